"""Hook of mkdocs.yml: the pages of the repository's root become pages of the site, and links to them lead there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md"}
FILES = {"LICENSE": "LICENSE.txt", "CITATION.cff": "CITATION.cff"}


def on_files(files: Files, config: Any) -> Files:
    """Add the root's pages and files to those of docs/."""
    for name, target in {**PAGES, **FILES}.items():
        content = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, target, content=relinked(content) if target.endswith(".md") else content))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links of docs/ to the root's pages."""
    for name, target in PAGES.items():
        markdown = markdown.replace(f"](../{name}", f"]({target}")
    return markdown


def relinked(markdown: str) -> str:
    """A page of the root with its links as they are from docs/. A link to a folder becomes its plain text."""
    for name, target in {**PAGES, **FILES}.items():
        markdown = re.sub(rf"\]\({re.escape(name)}(?=[)#])", f"]({target}", markdown)
    return re.sub(r"\[([^]]*)\]\(\.github[^)]*\)", r"\1", markdown.replace("](docs/", "]("))
