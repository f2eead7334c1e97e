"""Read the code blocks of README.md and docs/, and the commands in them."""

from __future__ import annotations

import re

from conftest import ROOT

README = ROOT / "README.md"
PAGES = [README, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(text: str) -> list[str]:
    """The indented code blocks of a page, without their indentation."""
    indented = re.findall(r"(?:^    .*\n|^\n(?=    ))+", text, flags=re.M)
    return ["\n".join(line[4:] for line in block.splitlines()).strip("\n") for block in indented]


def commands(block: str) -> list[str]:
    """The commands in a block, with continued lines joined. If the block has prompts, only the text after them."""
    lines = block.replace("\\\n", " ").splitlines()
    return [line[2:] for line in lines if line.startswith("$ ")] or lines


def commands_of(text: str) -> list[str]:
    """The lines in a page's code blocks that run fairseq-admin."""
    lines = [line for block in blocks(text) for line in commands(block)]
    return [line for line in lines if re.match(r"(echo .+ \| )?(\S+/)?fairseq-admin ", line)]
