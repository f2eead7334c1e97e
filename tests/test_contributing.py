"""CONTRIBUTING.md: are its instructions enough to add a scheme?"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT


@pytest.mark.slow
def test_the_scheme_is_added_by_the_diff(tmp_path: Path) -> None:
    """In a copy with the diff, do the layers compute the formula, and does the checkpoint name the scheme and load?"""
    for folder in ("fairseq_admin", "tests", "recipes"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 100
    (patch,) = re.findall(r"```diff\n(--- a/.*?)```", text, flags=re.S)
    subprocess.run(["git", "apply", "-"], input=patch, text=True, cwd=tmp_path, check=True)
    chosen = ["-k", "doubled and (written_out or names_the_scheme)", "-p", "no:cacheprovider", "-rA"]
    command = [sys.executable, "-m", "pytest", "tests/test_schemes.py", *chosen]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert process.returncode == 0 and process.stdout.count("PASSED") == 2, process.stdout[-4000:]
