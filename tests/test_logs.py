"""Losses are read from every format of fairseq's log, with and without time and tag, whole, resumed or truncated."""

from __future__ import annotations

import pytest

from fairseq_admin import logs

HEAD = "2026-11-21 20:37:30 | INFO | {} | "
PARAMS = "num. shared model params: 200,704 (num. trained: 200,704)"
# Shortened lines of fairseq 0.12.
JSON = [
    ("train_inner", '{"epoch": 1, "update": 0.041, "nll_loss": "9.914", "num_updates": "6", "train_wall": "36"}'),
    ("valid", '{"epoch": 1, "valid_loss": "10.5", "valid_nll_loss": "10.028", "valid_num_updates": "6"}'),
    ("train_inner", '{"epoch": 1, "update": 0.083, "nll_loss": "9.522", "num_updates": "12", "train_wall": "36"}'),
    ("train", '{"epoch": 1, "train_nll_loss": "9.803", "train_num_updates": "12", "train_train_wall": "80"}'),
]
SIMPLE = [
    (
        "train_inner",
        "epoch 001:      6 / 145 loss=9.95, nll_loss=9.914, num_updates=6, lr=0.001, train_wall=36",
    ),
    ("valid", "epoch 001 | valid on 'valid' subset | loss 10.5 | nll_loss 10.028 | ppl 1044.35 | num_updates 6"),
    ("train_inner", "epoch 001:     12 / 145 loss=9.55, nll_loss=9.522, num_updates=12, lr=0.001, train_wall=36"),
    ("train", "epoch 001 | loss 9.9 | nll_loss 9.803 | num_updates 12 | lr 0.001 | train_wall 80 | wall 6"),
]


@pytest.mark.parametrize("lines", [JSON, SIMPLE], ids=["json", "simple"])
@pytest.mark.parametrize("name", ["valid.1", "a_b-c"])
def test_the_first_subset_is_shown_whatever_its_name(lines, name):
    """Subsets are named after files, so any letters may occur. Whatever the names are, the first subset is shown."""
    texts = [text.replace("valid_", f"{name}_").replace("'valid'", f"'{name}'") for _, text in lines]
    assert logs.stats(texts[1])[1]["subset"] == name
    log = logs.parse_log([*texts[:2], lines[1][1].replace("10.028", "9.0"), *texts[2:]])
    assert (log.train, log.valid) == ({6: 9.914, 12: 9.522}, {6: 10.028})


@pytest.mark.parametrize("lines", [JSON, SIMPLE], ids=["json", "simple"])
@pytest.mark.parametrize("epochs_only", [False, True])
def test_the_first_subset_of_each_report_counts_after_a_resume(lines, epochs_only):
    """After a resume, the first subset of each report counts, whatever was reported before."""
    texts = [text for tag, text in lines if tag != "train_inner" or not epochs_only]
    other = OTHER["json" if lines is JSON else "simple"]
    more = [text.replace("6", "20") for text in (other, texts[1 - epochs_only].replace("10.028", "8.5"))]
    log = logs.parse_log([*texts, *more])
    assert log.valid == {6: 10.028, 20: 9.0} and log.updates == 20


def test_the_gpus_are_those_of_the_last_start():
    line = "| INFO | fairseq.utils | rank   {}: capabilities =  8.0  ; total memory = 40.000 GB ; name = {}"
    both = [line.format(rank, "A100") for rank in (0, 1)]
    assert logs.parse_log(both).gpus == ("A100", "A100")
    assert logs.parse_log([*both, line.format(0, "H100")]).gpus == ("H100",)


@pytest.mark.parametrize("lines", [JSON, SIMPLE], ids=["json", "simple"])
@pytest.mark.parametrize("tagged", [True, False], ids=["stdout", "log-file"])
def test_every_format_tells_the_same(lines, tagged):
    """All formats give the same losses. --log-file drops the tags and adds a handler every epoch, so lines repeat."""
    texts = [HEAD.format(tag) + text if tagged else text for tag, text in lines]
    log = logs.parse_log([PARAMS, *(line for line in texts for _ in range(1 if tagged else 2))])
    assert (log.train, log.valid) == ({6: 9.914, 12: 9.522}, {6: 10.028})
    assert (log.params, log.updates, log.hours) == (200704, 12, pytest.approx(80 / 3600))
    assert logs.parse_log(texts[:3]).hours == pytest.approx(72 / 3600), "of an epoch that has not ended, its intervals'"
    assert log.epochs == pytest.approx(0.083, abs=1e-3)


OTHER = {
    "json": '{"epoch": 1, "test_loss": "9.5", "test_nll_loss": "9.0", "test_num_updates": "6"}',
    "simple": "epoch 001 | valid on 'test' subset | loss 9.5 | nll_loss 9.0 | ppl 512 | num_updates 6",
}


@pytest.mark.parametrize("lines", [JSON, SIMPLE], ids=["json", "simple"])
def test_a_resumed_run_goes_on_from_its_checkpoint(lines):
    """Updates after the resumed checkpoint are dropped: this run was killed after update 24 and resumed from 12."""

    def at(place, update, loss):
        text = lines[place][1].replace(': "6', f': "{update}').replace("num_updates=6", f"num_updates={update}")
        return text.replace("num_updates 6", f"num_updates {update}").replace("9.914", loss).replace("10.028", loss)

    killed = [at(0, 6, "9.0"), at(0, 12, "8.0"), at(1, 12, "8.5"), at(0, 18, "7.0"), at(0, 24, "6.0"), at(1, 24, "6.5")]
    log = logs.parse_log([*killed, at(0, 15, "7.5")])
    assert (log.train, log.valid, log.updates) == ({6: 9.0, 12: 8.0, 15: 7.5}, {12: 8.5}, 15)


def test_the_last_of_several_runs_counts():
    """A run that starts again in the same log may have other intervals. A start without a record changes nothing."""
    intervals = [JSON[0][1].replace('"6"', f'"{update}"') for update in (5, 10, 8)]
    fresh, resumed = "No existing checkpoint found c.pt", "Loaded checkpoint c.pt (epoch 3 @ 8 updates)"
    assert logs.parse_log([fresh, *intervals[:2], fresh, intervals[2]]).train == {8: 9.914}
    assert logs.parse_log([*intervals[:2], fresh, resumed, intervals[1]]).train == {5: 9.914, 10: 9.914}


def test_a_cut_line_hides_no_record():
    """A truncated line does not hide the record that follows on it. Lines that only look like records are ignored."""
    cut = JSON[0][1][:40]
    assert logs.parse_line(cut) is None and logs.parse_line('{"epoch": 1, "num_updates": "x"}') is None
    assert str(logs.parse_line(cut + JSON[1][1])) == str(logs.parse_line(JSON[1][1]))
    assert logs.parse_line(SIMPLE[0][1][:50] + SIMPLE[2][1]) == logs.parse_line(SIMPLE[2][1])
    for line in (
        "{'_name': None, 'common': {'seed': 1}}",
        '{"beam": 5}',
        "epoch 001 | of | nothing",
        "H-3\t-0.2\t{ a }",
    ):
        assert logs.parse_line(line) is None, line
