"""Are the three scores the ones that the field reports?"""

from __future__ import annotations

import importlib

import pytest
from conftest import run_module

from fairseq_admin.text.tokens import Text
from recipes import results_table
from recipes.steps import results, score
from recipes.steps.common import write_lines
from recipes.text import write_rules

HYPOTHESES = [
    "the cat sat on the mat near the well-known house .",
    "a so-called long-term plan , it &apos;s said , has failed .",
    "he said nothing .",
    "the man , who is old , went home at six o &apos;clock .",
]
REFERENCES = [
    "the cat sat on a mat near a well-known house .",
    "the so-called long-term plan , it &apos;s said , failed .",
    "she said nothing at all .",
    "the man , who is very old , went home at six o &apos;clock .",
]


def test_tokenised_bleu_is_fairseqs(tmp_path):
    """Does tokenised BLEU equal the BLEU4 that fairseq-score gives for the same tokens?"""
    write_lines(tmp_path / "hypotheses", HYPOTHESES)
    write_lines(tmp_path / "references", REFERENCES)
    given = ["--sys", tmp_path / "hypotheses", "--ref", tmp_path / "references"]
    done = run_module("fairseq_cli.score", *given, log=tmp_path / "log")
    text = Text("de", "en", escape=True)
    found = score.scores(text, HYPOTHESES, [text.detokenise(line) for line in REFERENCES], REFERENCES, False)
    assert f"BLEU4 = {found['tokenised']}," in done.output
    assert "tok:none" in found["tokenised_signature"] and "compound" not in found


@pytest.mark.parametrize(
    ("tokens", "split"),
    [
        ("rich-text - a b-c-d -e", "rich ##AT##-##AT## text - a b ##AT##-##AT## c-d -e"),
        ("rich @-@ text", "rich @ ##AT##-##AT## @ text"),
    ],
)
def test_compounds_are_split_as_the_script_splits_them(tokens, split):
    """Are words split as `perl -ple` splits them with the substitution in fairseq's compound_split_bleu.sh?"""
    assert score.split_compounds(tokens) == split


def test_a_model_of_lower_case_text_is_scored_without_case():
    raw = ["The Cat sat on the Mat today."]
    tokens = ["the cat sat on the mat today ."]
    for lowercase in (True, False):
        found = score.scores(Text("de", "en", lowercase=lowercase), tokens, raw, tokens, False)
        assert ("case:lc" in found["signature"]) == lowercase
        assert (found["score"] == "100.00") == lowercase


def test_chrf_and_the_paired_bootstrap_are_those_of_sacrebleus_command(tmp_path):
    """Do score, chrF2, intervals and p equal those that `sacrebleu -m bleu chrf --paired-bs` prints?"""
    text = Text("de", "en", escape=True)
    raw, first = ([text.detokenise(line) for line in lines] for lines in (REFERENCES, HYPOTHESES))
    systems = {"first": first * 5, "other": (first[:2] + raw[2:]) * 5}
    for name, lines in {"raw": raw * 5, **systems}.items():
        write_lines(tmp_path / name, lines)
    words = ["-i", *(tmp_path / name for name in systems), "-m", "bleu", "chrf", "--paired-bs", "-w", "3", "-f", "text"]
    done = run_module("sacrebleu.sacrebleu", tmp_path / "raw", *words, log=tmp_path / "log")
    results, count = score.paired(text, systems, raw * 5)
    for one, other in results.values():
        for cell in (one, other):
            assert f"{cell.score:.3f} ({cell.mean:.3f} \u00b1 {cell.ci:.3f})" in done.output, done.output
        assert one.p_value is None and f"(p = {other.p_value:.4f})" in done.output and 0 < other.p_value < 1
    assert count == 1000 and results["sacreBLEU"][0].score != results["chrF2"][0].score
    scores = score.scores(text, HYPOTHESES * 5, raw * 5, REFERENCES * 5, False)
    assert scores["chrf"] == f"{results['chrF2'][0].score:.2f}" and "nc:6|nw:0" in scores["chrf_signature"]


def test_a_large_test_set_has_fewer_resamples(monkeypatch):
    monkeypatch.setattr(score, "DRAWS", 800)
    lines = [f"the number is {number} ." for number in range(4)]
    assert score.paired(Text("de", "en"), {"a": lines, "b": lines[::-1]}, lines)[1] == 200


# -- languages -------------------------------------------------------------------------------------------------------


def test_chinese_is_scored_by_its_characters():
    """Does Chinese, scored by characters, match the same text with different spaces? With 13a, no word would match."""
    raw = ["\u6211\u4eec\u4eca\u5929\u53bb\u5b66\u6821\u3002"]
    for code in ("zh", "zh_CN", "yue"):
        found = score.scores(Text("en", code), ["\u6211\u4eec \u4eca\u5929\u53bb \u5b66\u6821 \u3002"], raw, raw, False)
        assert (found["score"], "tok:zh" in found["signature"]) == ("100.00", True), code


@pytest.mark.parametrize(("target", "module"), [("ja", "ja_mecab"), ("ko", "ko_mecab")])
def test_a_language_without_its_tokeniser_is_refused_before_training(target, module, monkeypatch, tmp_path):
    tokeniser = importlib.import_module(f"sacrebleu.tokenizers.tokenizer_{module}")
    monkeypatch.setattr(tokeniser, "MeCab", None)  # as if it were not installed
    with pytest.raises(ValueError, match=rf"^{target}: sacreBLEU needs MeCab.*Run pip install 'sacrebleu\[{target}\]'"):
        write_rules(tmp_path / "text.json", "en", target, ())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("pair", "unknown"),
    [("de-en", None), ("ja-en", None), ("liv-zh_CN", "liv and zh_CN"), ("xx-en", "xx")],
)
def test_languages_that_the_tokeniser_does_not_know_are_said_once(pair, unknown, caplog, tmp_path):
    caplog.set_level("INFO")
    write_rules(tmp_path / "text.json", *pair.split("-"), ())
    assert caplog.messages == [f"The tokeniser does not know {unknown} and treats it as English."] * bool(unknown)


# -- results and table -----------------------------------------------------------------------------------------------


def row(recipe: str, method: str, seed: int, tokenised: str, preset: str = "paper", **more: str) -> dict[str, str]:
    rule = "reference" if method == "admin" else ""
    key = dict(zip(results.KEY, (recipe, method, rule, preset, "", str(seed)), strict=True))
    measured = {"tokenised": tokenised, "score": "30.00", "hours": "1.50", "commit": "abc"}
    return dict.fromkeys(results.COLUMNS, "") | key | measured | more


def test_the_table_sets_means_beside_the_papers_numbers():
    papers = [
        {"recipe": "iwslt14", "method": "admin", "bleu": "35.67 ± 0.15"},
        {"recipe": "wmt14-ende-18l", "method": "post-ln", "bleu": "failed"},
    ]
    measured = [
        row("demo", "admin", 1, "99.00", preset="cpu"),
        row("iwslt14", "admin", 10, "35.00"),
        row("iwslt14", "admin", 9, "36.00", commit="def"),
        row("iwslt14", "admin", 1, "3.00", preset="small"),
        row("iwslt14", "admin", 1, "34.00", options="lr5e-4"),
        row("iwslt14", "admin", 1, "33.00", rule="constant"),
    ]
    rows = results_table.lines(measured, papers)
    assert [(r["recipe"], r["preset"]) for r in rows] == [
        *[("iwslt14", "paper"), ("iwslt14", "small")], *[("iwslt14", "paper")] * 2,
        *[("wmt14-ende-18l", ""), ("demo", "cpu")],
    ]  # fmt: skip
    mean, *others, missing, _ = rows
    # The standard deviation of 35 and 36 is 1/sqrt(2).
    assert (mean["tokenised BLEU"], mean["paper"], mean["seeds"]) == ("35.50 ± 0.71", "35.67 ± 0.15", "9, 10")
    assert (mean["sacreBLEU"], mean["compound BLEU"], mean["commit"]) == ("30.00 ± 0.00", "", "abc, def")
    # A small run, a changed one and one by another rule are no attempts at the paper's number.
    assert [(row["tokenised BLEU"], row["paper"]) for row in others] == [("3.00", ""), ("34.00", ""), ("33.00", "")]
    assert (missing["tokenised BLEU"], missing["paper"]) == ("", "failed")


def test_the_papers_numbers_are_of_recipes_that_there_are(tmp_path):
    results.keep(tmp_path / "results.csv", row("iwslt14", "admin", 1, "35.50"))
    done = run_module("recipes.results_table", tmp_path, log=tmp_path / "log")
    assert done.status == 0 and done.output == (tmp_path / "table.md").read_text(encoding="utf-8")
    lines = done.output.splitlines()
    assert sum(line.startswith(("| wmt14-", "| iwslt14")) for line in lines) == 21
    assert any("| 35.50" in line and "| 35.67 ± 0.15" in line for line in lines)


def test_a_table_of_an_earlier_version_goes_on(tmp_path):
    """A table lacks chrF2 and the user's options, and has a column that is no more. Its rows stay whole."""
    table, old = tmp_path / "results.csv", row("demo", "admin", 1, "35.50", preset="cpu", beam="5")
    later = {"chrf", "chrf_signature", "options"}
    results.write_runs(table, [{name: cell for name, cell in old.items() if name not in later}])
    results.keep(table, row("demo", "admin", 2, "36.50", preset="cpu", chrf="60.00"))
    assert results.read(table) == [old, row("demo", "admin", 2, "36.50", preset="cpu", chrf="60.00", beam="")]
    (both,) = results_table.lines(results.read(table), [])
    assert (both["chrF2"], both["tokenised BLEU"]) == ("60.00", "36.00 ± 0.71")


@pytest.mark.parametrize("text", ["", "recipe,score\n"])
def test_another_table_is_refused_and_stays(tmp_path, text):
    (tmp_path / "results.csv").write_text(text)
    with pytest.raises(ValueError, match="results.csv: expected the columns recipe,method,.* Move the file away"):
        results.keep(tmp_path / "results.csv", {name: "1" for name in results.COLUMNS})
    assert (tmp_path / "results.csv").read_text() == text
