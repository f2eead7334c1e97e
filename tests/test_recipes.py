"""The steps of a recipe after its text: length, logs, progress, score and summary."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

from fairseq_admin import bar
from fairseq_admin.text.tokens import Text
from recipes.steps import results, score, summary
from recipes.steps.common import read_lines, write_lines
from recipes.steps.progress import progress

PLAIN = Text("de", "en")


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        ("open('setup.py/x')", 2, "setup.py/x: Not a directory. Check the path and its permissions"),
        ("with open('/dev/full', 'w') as out: out.write('x')", 2, "No space left on device. Check the path"),
        ("print('x', flush=True)", 141, ""),
        ("import signal; os.kill(os.getpid(), signal.SIGUSR2); signal.pause()", 130, ""),
    ],
)
def test_a_fault_of_the_machine_is_one_line(code, status, said):
    """A machine fault is reported in one line. If stdout's reader has gone, as with `head -1`, there is no line."""
    reader, writer = os.pipe()
    os.close(reader)
    source = f"import os\nfrom recipes.steps.common import run\ndef main():\n    {code}\nrun(main)"
    done = subprocess.run(
        [sys.executable, "-c", source], cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True
    )  # fmt: skip
    os.close(writer)
    assert done.returncode == status and said in done.stderr and done.stderr.count("\n") == bool(said)


# -- length, logs, progress ------------------------------------------------------------------------------------------


HEAD = "2026-01-01 00:00:00 | INFO |"


def log_line(tag: str, updates: int, bits: float) -> str:
    if tag == "valid":
        values = {"epoch": -(-updates // 16), "valid_nll_loss": str(bits), "valid_num_updates": str(updates)}
    else:
        values = {"epoch": -(-updates // 16), "update": updates / 16, "nll_loss": str(bits)}
        values |= {"num_updates": str(updates), "lr": "0.001", "train_wall": "36"}
    return f"{HEAD} {tag} | {json.dumps(values)}"


PARAMS = f"{HEAD} fairseq_cli.train | num. shared model params: 1,234 (num. trained: 1,234)"
LOG = [PARAMS, log_line("train_inner", 10, 8.0), log_line("valid", 20, 6.25)]


def test_a_log_without_training_is_refused(tmp_path):
    write_lines(tmp_path / "train.log", [PARAMS])
    with pytest.raises(ValueError, match="found 0 training intervals, 0 validations and a parameter count"):
        results.checked_log(tmp_path / "train.log")


def test_progress_shows_the_pace_and_hides_no_error():
    lines = [
        f"{HEAD} fairseq_cli.train | TransformerModel(",
        "  (encoder): TransformerEncoder(",
        ")",
        log_line("train_inner", 10, 8.0),
        log_line("train_inner", 20, 7.0),
        log_line("valid", 20, 6.5),
        f"{HEAD} fairseq_admin.method.profiling | Admin: profiled",
        "2026-01-01 00:00:00 | WARNING | fairseq.trainer | beware",
        f"{HEAD} fairseq.trainer | nothing new",
        "Traceback (most recent call last):",
        '  File "x.py", line 1, in <module>',
        "ZeroDivisionError: division by zero",
    ]
    ticks = iter([100.0, 105.0])
    shown = list(progress(lines, updates=100, clock=lambda: next(ticks)))
    # Ten updates took five seconds; eighty remain.
    assert "0.50 s/update  00:40 left" in shown[1]
    assert [line.split()[0] for line in shown[:3]] == ["update"] * 3
    assert "Admin: profiled" in shown[3] and "beware" in shown[4]
    assert shown[5:] == lines[-3:]
    ticks = iter([100.0, 105.0])
    lines = [log_line("valid", 8, 8.5), log_line("train_inner", 8, 8.0), log_line("train_inner", 24, 7.0)]
    lines += [log_line("valid", update, 6.5) for update in (24, 25, 32)]
    before, *shown = progress(lines, epochs=3, clock=lambda: next(ticks))
    # One epoch took five seconds; one and a half remain.
    assert shown[1].startswith("epoch   1.50/3  update     24  train  7.000") and "5.00 s/epoch  00:07 left" in shown[1]
    # An epoch has 16 updates. fairseq logs only the epoch of a validation.
    assert before.startswith("epoch   in 1/3  update      8  valid")
    assert [line.split("/")[0] for line in shown[2:]] == ["epoch   1.50", "epoch   1.56", "epoch   2.00"]


def test_progress_of_a_translation_is_a_bar(monkeypatch, capsys):
    monkeypatch.setattr(bar, "SECONDS", 0)
    assert not list(progress(GENERATED, sentences=6))
    assert "translate: 2 of 6 sentences (33 %)" in capsys.readouterr().err
    begin = f"{HEAD} fairseq.trainer | begin training epoch 1"
    assert list(progress([begin, begin], updates=9, every=5)) == [
        "The first 5 updates take a while: no line comes before."
    ]


# -- score -----------------------------------------------------------------------------------------------------------

GENERATED = ["S-1\tb", "T-1\tB", "H-1\t-0.5\tB@@ e .", "D-1\t-0.5\tBe .", "P-1\t-0.1", "H-0\t-0.2\tA", "H-2\t-1\t"]


@pytest.mark.parametrize(
    ("lines", "count", "message"),
    [
        (GENERATED, 5, "2 of 5 hypotheses are missing, the first for sentence 4"),
        (GENERATED, 2, "H-2 is outside the 2 sentences"),
    ],
)
def test_missing_or_strange_hypotheses_are_refused(lines, count, message):
    with pytest.raises(ValueError, match=message):
        score.hypotheses(lines, count)


def test_the_first_of_several_hypotheses_is_scored():
    assert score.hypotheses([*GENERATED, "H-0\t-1\tworse"], 3) == ["A", "B@@ e .", ""]


REFERENCES = ["The concert starts at seven o'clock.", "Anna was born in Italy.", "Peter has to pay two euros, I think."]


def make_run(folder: Path, translations: list[str] = REFERENCES, bits: float = 6.0) -> Path:
    """A run's folder before scoring, with the raw test set two levels up."""
    for text in ("raw", "bpe"):
        write_lines(folder.parent / text / "test.de", ["eins", "zwei", "drei"])
        write_lines(folder.parent / text / "test.en", REFERENCES)
    write_lines(folder / "train.log", [*LOG, log_line("valid", 30, bits)])
    write_lines(folder.parent / "tok/test.en", [PLAIN.tokenise(line, "en") for line in REFERENCES])
    tokens = [PLAIN.tokenise(line, "en") for line in translations]
    PLAIN.write(folder.parent / "text.json")
    write_lines(folder / "generate.txt", reversed([f"H-{n}\t-1\t{line}" for n, line in enumerate(tokens)]))
    return folder


def run_score(folder: Path, method: str = "admin", seed: int = 1, rule: str = "reference") -> None:
    prefixes = (folder.parent / name / "test" for name in ("raw", "tok", "bpe"))
    key = {"recipe": "demo", "method": method, "rule": rule, "preset": "cpu", "options": "", "seed": str(seed)}
    scores = score.translations(folder, PLAIN, *prefixes, True)
    results.record(folder, folder.parent / "results.csv", key, {"tokens": 2048, **scores})


def test_score_is_on_detokenised_text_and_a_run_has_one_row(tmp_path):
    folder = make_run(tmp_path / "admin-cpu-s1")
    for seed in (1, 2, 1):
        run_score(folder, seed=seed)
    rows = results.read(tmp_path / "results.csv")
    assert sorted(row["seed"] for row in rows) == ["1", "2"]
    # The translations equal the references, character by character.
    assert {row[name] for row in rows for name in ("score", "chrf", "tokenised", "compound")} == {"100.00"}
    assert all(row["signature"].startswith("nrefs:1|case:mixed") and row["updates"] == "30" for row in rows)
    curve = results.checked_log(folder / "train.log").valid
    assert curve and all(results.from_cell(row["valid"]) == pytest.approx(curve, rel=1e-3) for row in rows)
    assert read_lines(folder / "translations.txt") == REFERENCES


def test_what_is_too_long_for_the_model_counts_as_empty(tmp_path, caplog):
    """A sentence too long for the model counts as an empty translation in the score. No other may be missing."""
    folder = make_run(tmp_path / "admin-cpu-s1", REFERENCES[:2])
    write_lines(tmp_path / "bpe/test.de", ["eins", "zwei", "drei " * 1023 + "drei"])
    caplog.set_level("INFO")
    run_score(folder)
    assert "1 of 3 sentences are too long for the model and scored as empty" in caplog.text
    assert read_lines(folder / "translations.txt") == [*REFERENCES[:2], ""]
    assert 40 < float(results.read(tmp_path / "results.csv")[0]["score"]) < 60
    write_lines(tmp_path / "bpe/test.de", ["eins", "zwei", "drei " * 1022 + "drei"])
    with pytest.raises(ValueError, match="1 of 3 hypotheses are missing"):
        run_score(folder)


# -- summary ---------------------------------------------------------------------------------------------------------


def run_summary(folder: Path, *others: Path) -> str:
    rules = folder.parent / "text.json"
    summary.write(
        folder, list(others), "make demo", folder.parent / "raw/test", "de-en", rules, folder / "model/model.pt"
    )
    return (folder / "summary.txt").read_text(encoding="utf-8")


def test_rules_of_omega_are_set_side_by_side(tmp_path):
    """The summary compares omega's rules."""
    paper, run = (make_run(tmp_path / name) for name in ("admin-cpu-s1", "admin-constant-cpu-s1"))
    run_score(paper)
    run_score(run, rule="constant")
    assert [row["rule"] for row in results.read(tmp_path / "results.csv")] == ["reference", "constant"]
    assert run_summary(run, paper).splitlines()[2].split() == ["Admin,", "constant", "Admin"]


def test_sentences_end_at_the_edge_of_the_terminal():
    text = "signature: nrefs:1|case:mixed\n  de  ein langer Satz\nIn runs/demo: translations.txt"
    assert summary.fitted(text, 12) == "signature: nrefs:1|case:mixed\n  de  ein...\nIn runs/demo: translations.txt"


def test_summary_of_one_run_and_then_of_two(tmp_path):
    admin = make_run(tmp_path / "it's $5" / "admin-cpu-s1", bits=1.5)
    run_score(admin)
    alone = run_summary(admin)
    assert shlex.split(alone.splitlines()[-1])[-1] == str(admin / "model/model.pt")
    assert ", p" not in alone
    assert "100.00" in alone and "Post-LN" not in alone and "make demo METHOD=post-ln SEED=1\n" in alone
    assert all(line in alone for line in REFERENCES)
    about = json.loads((admin / "run.json").read_text())
    assert about["samples"][0]["hypothesis"] == REFERENCES[0] and about["command"] == "make demo METHOD=admin SEED=1"

    post_ln = make_run(admin.parent / "post-ln-cpu-s1", ["at at at"] * 3, bits=5.5)
    run_score(post_ln, "post-ln", rule="")
    both = run_summary(post_ln, admin)
    (head, scores, chrf, *_) = (line.split() for line in both.splitlines()[2:])
    assert head == ["Admin", "Post-LN"]
    assert scores == ["sacreBLEU", "100.00", "0.00"]
    assert chrf[:2] == ["chrF2", "100.00"] and float(chrf[2]) < 10
    lines = {" ".join(line.split()) for line in both.splitlines()}
    assert {"sacreBLEU, 95 % 100.00 ± 0.00 0.00 ± 0.00", "sacreBLEU, p - 0.001", "chrF2, p - 0.001"} <= lines
    assert "p: paired bootstrap against Admin, 1000 resamples of the test set, one seed" in both
    assert both.count("signature: ") == 2
    assert "update 30 1.500 5.500" in " ".join(both.split())
    assert "at at at" in both and "make demo METHOD=pre-ln SEED=1\n" in both and "METHOD=post-ln" not in both
