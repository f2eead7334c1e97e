"""README.md and docs/: do links work, do tables match the kept rows, and is every option documented?"""

from __future__ import annotations

import argparse
import dataclasses
import doctest
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from fairseq.models import ARCH_MODEL_NAME_REGISTRY
from pages import PAGES, commands_of

import fairseq_admin.pytorch as admin
from fairseq_admin import TransformerAdminModel, cli
from fairseq_admin.architectures.config import AdminOptions, NewLayersOptions
from fairseq_admin.method.schemes import RULES, SCHEMES
from fairseq_admin.radam import RAdam, RAdamConfig
from fairseq_admin.schedule import DecayConfig
from recipes.research.figures import TABLES, write_tables
from recipes.research.ranking import learning

each_page = pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])


@each_page
def test_command_lines_parse(page: Path) -> None:
    """Does the parser accept every fairseq-admin command in a code block?"""
    for line in commands_of(page.read_text(encoding="utf-8")):
        words = shlex.split(line, comments=True)
        program = next(number for number, word in enumerate(words) if Path(word).name == "fairseq-admin")
        cli.parse(words[program + 1 :])  # exits on an error


def test_tables_are_those_of_the_kept_rows() -> None:
    """Are the pages equal to the output of `make figures`, with all its tables?"""
    texts = {page.name: page.read_text(encoding="utf-8") for page in PAGES}
    for name, text in texts.items():
        assert write_tables(text) == text, f"{name}: run make figures"
    assert set(re.findall(r"<!-- table (\S+) -->", "".join(texts.values()))) == set(TABLES)


def test_a_table_that_is_not_known_is_refused() -> None:
    with pytest.raises(ValueError, match="table nonesuch; expected one of every-scheme,"):
        write_tables("<!-- table nonesuch -->\n<!-- end -->\n")


def options(config: type) -> set[str]:
    fields = dataclasses.fields(config)
    names = {it.name for it in fields if not str(it.default).startswith("${") and not it.name.startswith("_")}
    return {f"--{name.replace('_', '-')}" for name in names}


def verbs() -> set[str]:
    """fairseq-admin's verbs, each with its options."""
    parsers: dict[str, argparse.ArgumentParser] = cli.parsers()[1]
    names = {name for parser in parsers.values() for action in parser._actions for name in action.option_strings}
    return {f"fairseq-admin {verb}" for verb in parsers} | names - {"-h", "--help"}


def architectures() -> set[str]:
    models = {"transformer_admin", "transformer_lm_admin", "masked_lm_admin", "deeper_admin"}
    return {arch for arch, model in ARCH_MODEL_NAME_REGISTRY.items() if model in models}


@pytest.mark.parametrize(
    "page, names",
    [
        ("options.md", options(AdminOptions) | options(RAdamConfig) | options(DecayConfig) | set(RULES)),
        ("options.md", architectures() | options(NewLayersOptions)),
        ("commands.md", verbs()),
        ("schemes.md", set(SCHEMES)),
    ],
    ids=["options", "architectures", "verbs", "schemes"],
)
def test_pages_name_everything(page: str, names: set[str]) -> None:
    """Is every option, architecture, verb and scheme on its page?"""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert len(names) > 5
    assert sorted(name for name in names if not re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text)) == []


def test_a_scheme_learns_at_a_rate_where_every_seed_does() -> None:
    runs = [("1e-3", 1), ("1e-3", 2), ("3e-4", 1), ("3e-4", 2), ("1e-4", 1)]
    rows = [
        {"scheme": "admin", "optimizer": "sgd", "warmup": warmup, "lr": lr, "seed": str(seed), "verdict": "learned"}
        for warmup in ("0", "100")
        for lr, seed in runs
    ]
    rows[3]["verdict"], rows[5]["verdict"] = "plateau", "diverged"
    assert learning(rows) == [{"scheme": "Admin, SGD", "warm-up 0": "1e-4 1e-3", "warm-up 100": "1e-4 3e-4"}]
    rows[7]["verdict"] = rows[9]["verdict"] = "plateau"
    assert learning(rows)[0]["warm-up 100"] == "none"


def test_the_site_builds(tmp_path):
    """Does the site build? A broken link or anchor, or a page outside the navigation, is an error."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path)]
    process = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    )
    # With -q, warnings would be hidden and --strict would not count them.
    assert process.returncode == 0, process.stderr
    start = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert 'href="results/#demo"' in start and 'src="images/24-layers.png"' in start


@pytest.mark.parametrize("documented", [TransformerAdminModel, RAdam, admin.attach, admin.fold, admin.diagnose])
def test_docstring_examples_run(documented: type) -> None:
    torch.manual_seed(1)
    finder, names = doctest.DocTestFinder(recurse=False), {"torch": torch, "admin": admin}
    (example,) = finder.find(documented, documented.__name__, extraglobs=names)
    assert example.examples and not doctest.DocTestRunner().run(example).failed
