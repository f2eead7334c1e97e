"""README.md and docs/ as the tests read them: tables, code spans and blocks of code."""

from __future__ import annotations

import re

from conftest import ROOT

README = ROOT / "README.md"
PAGES = [README, ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGE_NAMES = [page.name for page in PAGES]


def docs(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def section(text: str, title: str) -> str:
    """What is under a heading, up to the next one of any level."""
    _, *found = re.split(rf"^##+ {re.escape(title)}\n", text, maxsplit=1, flags=re.M)
    return re.split(r"^#+ ", "".join(found), maxsplit=1, flags=re.M)[0]


def rows(text: str) -> list[list[str]]:
    """The cells of every table in a text, without heads and rules."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    heads = {number - 1 for number, line in enumerate(lines) if set(line) <= set("|-")}
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for number, line in enumerate(lines)
        if number not in heads and not set(line) <= set("|-")
    ]


def spans(text: str) -> list[str]:
    """The code spans of a text."""
    return re.findall(r"`([^`]+)`", text)


def blocks(text: str) -> list[str]:
    """The indented code blocks of a page, without their indentation."""
    found = re.findall(r"(?:^    .*\n|^\n(?=    ))+", text, flags=re.M)
    return ["\n".join(line[4:] for line in block.splitlines()).strip("\n") for block in found]


def commands(block: str) -> list[str]:
    """The commands in a block, continued lines joined; in a block with prompts, what follows them."""
    lines = block.replace("\\\n", " ").splitlines()
    return [line[2:] for line in lines if line.startswith("$ ")] or lines


def verb_lines(text: str) -> list[str]:
    """The lines of a page's code that run fairseq-admin."""
    lines = [line for block in blocks(text) for line in commands(block)]
    return [line for line in lines if re.match(r"(echo .+ \| )?(\S+/)?fairseq-admin ", line)]
