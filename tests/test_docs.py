"""Do README.md and docs/ describe everything there is, and nothing else; and does the parser take their commands?"""

from __future__ import annotations

import argparse
import dataclasses
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT
from fairseq.models import ARCH_MODEL_NAME_REGISTRY
from pages import PAGE_NAMES, PAGES, README, blocks, commands, docs, rows, section, spans, verb_lines

from fairseq_admin import cli
from fairseq_admin.architectures.config import DEPTH_RULES, RULES, AdminOptions
from fairseq_admin.architectures.deeper_model import DEFAULTS, DeeperAdminModel
from fairseq_admin.architectures.masked_language_model import MaskedLMAdminModel
from fairseq_admin.method.schemes import EVERY, SCHEMES
from fairseq_admin.radam import RAdamConfig
from fairseq_admin.schedule import DecayConfig
from recipes.compare.grid_table import read_results, read_runs, spread
from recipes.compare.standing import interval, loss, markdown, paired, score, table
from recipes.steps import results
from recipes.steps.logs import from_cell

TRIO = ("admin", "post-ln", "pre-ln")


def make(*arguments: str) -> str:
    return subprocess.run(["make", *arguments], cwd=ROOT, capture_output=True, text=True).stdout


def test_readme_is_one_page() -> None:
    """Is the README short, and does it show a figure before any heading but its own?"""
    lines = README.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 150
    assert any(line.startswith("![") for line in lines[: next(n for n, line in enumerate(lines) if line[:3] == "## ")])


def anchors(page: Path) -> set[str]:
    """The names under which a page's headings are reached, as GitHub makes them."""
    heads = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=PAGE_NAMES)
def test_links_lead_somewhere(page: Path) -> None:
    """Does every relative link and image have a file, and every anchor a heading?"""
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(file), f"{page.name}: {target}"


def test_figures_are_shown_and_light() -> None:
    """Is every file in docs/images a figure that some page shows, of less than 100 kB?"""
    shown = {name for page in PAGES for name in re.findall(r"images/([\w.-]+)\)", page.read_text(encoding="utf-8"))}
    assert shown == {path.name for path in (ROOT / "docs" / "images").iterdir()}
    assert all(path.stat().st_size < 100_000 for path in (ROOT / "docs" / "images").iterdir())


def verbs() -> dict[str, set[str]]:
    """The sub-commands of fairseq-admin, each with its options."""
    return {
        verb: {name for action in parser._actions for name in action.option_strings} - {"-h", "--help"}
        for verb, parser in cli.parsers()[1].items()
    }


def test_commands_page() -> None:
    """Is every sub-command described with all of its options, and no other?"""
    page = docs("commands.md")
    titles = re.findall(r"^## fairseq-admin (\w+)$", page, flags=re.M)
    tables = {verb: rows(section(page, f"fairseq-admin {verb}")) for verb in titles}
    described = {verb: {name for row in table for name in spans(row[0])} for verb, table in tables.items()}
    assert described == verbs()


@pytest.mark.parametrize("page", PAGES, ids=PAGE_NAMES)
def test_command_lines_parse(page: Path) -> None:
    """Does the parser take every fairseq-admin command in a block of code?"""
    lines = verb_lines(page.read_text(encoding="utf-8"))
    for line in lines:
        words = shlex.split(line, comments=True)
        program = next(number for number, word in enumerate(words) if Path(word).name == "fairseq-admin")
        cli.parse(words[program + 1 :])  # exits if it cannot
    assert page is not README or len(lines) == 6


def test_architectures() -> None:
    """Is every --arch of ours described, and no other?"""
    models = {"transformer_admin", "transformer_lm_admin", "masked_lm_admin", "deeper_admin"}
    ours = {arch for arch, model in ARCH_MODEL_NAME_REGISTRY.items() if model in models}
    described = [spans(row[0]) for row in rows(section(docs("options.md"), "Architectures"))]
    assert sorted(described) == sorted([arch] for arch in ours)


@pytest.mark.parametrize(
    "config, title", [(AdminOptions, "Admin"), (RAdamConfig, "RAdam"), (DecayConfig, "T-Fixup's schedule")]
)
def test_options_page(config: type, title: str) -> None:
    """Is every option described with its default, and no other?"""
    described = {
        spans(row[0])[0]: row[1].strip("`") for row in rows(section(docs("options.md"), title)) if row[0][:3] == "`--"
    }
    there = {
        f"--{option.name.replace('_', '-')}": "-" if option.default is None else str(option.default)
        for option in dataclasses.fields(config)
        if not str(option.default).startswith("${") and not option.name.startswith("_")
    }
    assert described == there


def test_options_of_new_layers() -> None:
    """Is every option that deeper_admin adds described with its default, and no other?"""
    parsers = {model: argparse.ArgumentParser() for model in (MaskedLMAdminModel, DeeperAdminModel)}
    for model, parser in parsers.items():
        model.add_args(parser)
    masked, deeper = ({name for it in p._actions for name in it.option_strings} for p in parsers.values())
    described = {
        spans(row[0])[0]: row[1].strip("`")
        for row in rows(section(docs("options.md"), "New layers on a pre-trained encoder"))
    }
    assert described.keys() == deeper - masked
    assert described == {f"--{name.replace('_', '-')}": "-" if it is None else str(it) for name, it in DEFAULTS.items()}


def test_rules_of_omega() -> None:
    """Is every --admin-init described, and no other, and are those that do not profile said not to?"""
    described = {spans(row[0])[0]: row[1] for row in rows(section(docs("options.md"), "Admin")) if row[0][:3] != "`--"}
    assert tuple(described) == RULES
    assert tuple(rule for rule, text in described.items() if "without profiling" in text) == DEPTH_RULES


def test_schemes() -> None:
    """Do the tables of schemes hold the rows of the code's table, with its sources?"""
    table = rows(docs("schemes.md"))
    assert [(spans(row[0])[0], row[4]) for row in table] == [(name, row.source) for name, row in EVERY.items()]
    for name, *_, folds, _ in table:
        scheme = EVERY[spans(name)[0]]
        if scheme.stock_layers:
            assert folds == "is stock", name
        else:
            assert folds == ("yes" if scheme.folds else "no"), name
    short = section(README.read_text(encoding="utf-8"), "Schemes")
    assert sorted(name for row in rows(short) for name in spans(row[0])) == sorted(SCHEMES)


def test_targets() -> None:
    """Is every target of the Makefile described, and is there every one that a page names?"""
    (phony,) = re.findall(r"^\.PHONY: (.+)$", make("-qpRr", "help"), flags=re.M)
    targets = set(phony.split())
    described = {target for text in spans(docs("recipes.md")) for target in re.findall(r"^make ([a-z][\w-]*)", text)}
    steps = {
        target
        for target in targets
        if re.fullmatch(r"wmt14-.+-(preflight|prepare|train|average|generate|score)", target)
    }
    assert len(targets) > 20 and described == targets - steps
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        named = [*spans(text), *(line for block in blocks(text) for line in commands(block))]
        wanted = {target for text in named for target in re.findall(r"^make ([a-z][\w-]*)(?![\w*-])", text)}
        assert wanted <= targets, page.name


def test_variables() -> None:
    """Does some makefile read every variable that the recipes' page describes, or hand it to its commands?"""
    makefiles = [ROOT / "Makefile", *(ROOT / "recipes").rglob("Makefile"), *(ROOT / "recipes").rglob("*.mk")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in makefiles)
    described = [name for row in rows(section(docs("recipes.md"), "Variables")) for name in spans(row[0])]
    assert len(described) > 20
    for name in described:
        assert re.search(rf"\$\({name}[:)]|^export {name} [?:]=", text, flags=re.M), name


def test_multi30k_rate_by_rate() -> None:
    """Are the numbers for each of Pre-LN's rates, and those in the README, those of the runs that are kept?"""
    runs = read_runs(ROOT / "docs" / "multi30k.csv")
    page = section(docs("results.md"), "Trained on")
    prose = page.replace("\n", " ")
    admin = [run for run in runs if run["scheme"] == "admin"]
    short = [
        f"{interval([loss(run) for run in admin]).mean:.2f}",
        f"{interval([score(run) for run in admin]).mean:.1f}",
    ]
    for rate in ("1e-3", "3e-3"):
        them = [run for run in runs if (run["scheme"], run["lr"]) == ("pre-ln", rate)]
        bits, bleu = ", ".join(f"{loss(run):.3f}" for run in them), ", ".join(f"{score(run):.2f}" for run in them)
        assert f"| at {rate} | {bits} | {bleu} |" in page
        more, less = paired(them, admin, loss), paired(admin, them, score)
        assert f"higher than Admin's by {more:.3f}" in prose or f"bits are higher by {more:.3f}" in prose
        assert f"lower by {less:.2f}" in prose
        short += [f"{interval([loss(it) for it in them]).mean:.2f} and {interval([score(it) for it in them]).mean:.1f}"]
        assert f"{paired(them, admin, lambda run: run['valid'][7500]):.3f} at {rate}" in prose
    six = [run for run in runs if run["layers"] == "6"]
    assert len(six) == 2
    for run, seed in zip(six, ("seed 1", "seed 2, which")):
        assert re.search(rf"{loss(run):.3f}( bits)? and (sacreBLEU )?{score(run):.2f} with {seed}", prose)
    short += [f"{loss(six[0]):.2f} and {loss(six[1]):.2f}, {score(six[0]):.1f} and {score(six[1]):.1f}"]
    (row,) = (
        line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("| Multi30k de-en, 18L")
    )
    assert all(number in row for number in short)


def test_tatoeba() -> None:
    """Are the scores those of the rows?"""
    runs = {row["method"]: row for row in results.read(ROOT / "docs/results.csv") if "tatoeba" in row["recipe"]}
    page = section(docs("results.md"), "Tatoeba")
    titles = " | ".join(SCHEMES[method].title for method in runs)
    assert f"\n| | {titles} |\n" in page
    for title, column in (("sacreBLEU, test", "score"), ("BLEU of tokens, test", "tokenised")):
        assert f"| {title} | {' | '.join(row[column] for row in runs.values())} |" in page
    for update in (1000, 2000):
        losses = " | ".join(f"{from_cell(row['valid'])[update]:.3f}" for row in runs.values())
        assert f"| bits per token, valid, update {update} | {losses} |" in page


def test_demo() -> None:
    """Are the scores in the README and the losses those of the rows, and is Post-LN as bad as it says?"""
    found = [row for row in results.read(ROOT / "docs/results.csv") if row["recipe"] == "demo"]
    runs = [next(row for row in found if (row["method"], row["seed"]) == (name, "1")) for name in TRIO]
    told = README.read_text(encoding="utf-8")
    for title, name in (("sacreBLEU", "score"), ("parameters", "params"), ("updates", "updates"), ("hours", "hours")):
        cells = "".join(f"{row[name]:>{width}}" for row, width in zip(runs, (9, 11, 10)))
        assert f"    {title:10}{cells}\n" in told
    curves = [from_cell(row["valid"]) for row in runs]
    page = section(docs("results.md"), "Demo")
    assert len(re.findall("^    update ", page, re.M)) == 7
    for update in range(100, 1001, 150):
        admin, post_ln, pre_ln = (curve[update] for curve in curves)
        assert f"    update {update:<17}{admin:8.3f}{post_ln:11.3f}{pre_ln:10.3f}\n" in page
    assert f"Post-LN ends at\n{curves[1][1000]:.2f} bits per token" in told
    (second,) = (row["score"] for row in found if row["seed"] == "2")
    assert f"A second seed of Admin has {second} sacreBLEU." in page.replace("\n", " ")


def test_without_warmup() -> None:
    """Do all runs learn, as far as the page says, and is a high beta2 the slower one at the lowest rate?"""
    runs = read_results([ROOT / "docs" / "sensitivity.csv"], ("scheme", "lr", "beta2", "seed"))
    prose = section(docs("results.md"), "Without warm-up").replace("\n", " ")
    assert {run["verdict"] for run in runs} == {"learned"} and f"All {len(runs)} learn." in prose
    assert {run["seed"] for run in runs} == {"1"} and {run["scheme"] for run in runs} == {"admin", "post-ln", "pre-ln"}
    low, high = ([loss(run) for run in runs if (float(run["lr"]) < bound) == below] for bound, below in
                 ((2e-4, True), (3e-4, False)))  # fmt: skip
    assert f"at 1e-4 they have not learned all yet ({min(low):.2f} to {max(low):.2f})" in prose
    assert f"From 3e-4 on each ends at {min(high):.2f} to {max(high):.2f} bits per token" in prose
    for scheme in ("admin", "post-ln", "pre-ln"):
        slow = {run["beta2"]: loss(run) for run in runs if (run["scheme"], run["lr"]) == (scheme, "1e-4")}
        assert slow["0.99"] < slow["0.995"] < slow["0.999"]


def test_language_models() -> None:
    """Are the perplexities those of the runs, three seeds a method?"""
    runs = [row for row in results.read(ROOT / "docs/results.csv") if row["recipe"] == "lm-demo"]
    found = {name: [float(row["perplexity"]) for row in runs if row["method"] == name] for name in TRIO}
    assert len(runs) == 9 and all(len(values) == 3 for values in found.values())
    cells = " | ".join(spread(list(values), 1) for values in found.values())
    page = section(docs("results.md"), "Language model")
    assert f"| perplexity per word, test | {cells} |" in page
    first, second, third = (f"{value:.1f}" for value in found["post-ln"])
    assert f"Post-LN has {first}, {second} and {third} with the three seeds." in page


@pytest.mark.parametrize(
    "runs, title",
    [("compare.csv", "Every scheme"), ("multi30k-search.csv", "Multi30k"), ("multi30k.csv", "Trained on")],
)
def test_comparison(runs: str, title: str) -> None:
    """Is the table of a comparison that of its runs?"""
    wanted = "\n".join(markdown(table(read_runs(ROOT / "docs" / runs))))
    assert wanted in section(docs("results.md"), title)
