"""Does every long step show its progress, on a terminal and in a log?"""

from __future__ import annotations

import fcntl
import os
import random
import re
import struct
import subprocess
import sys
import termios
from contextlib import suppress

import pytest
from archives import write_tar
from conftest import ROOT

from fairseq_admin import bar as the_plugins
from fairseq_admin.text.tokens import Text
from recipes.steps import bar, bpe, extract, pairs
from recipes.steps.common import write_lines


class Clock:
    """A clock in seconds that the test sets."""

    def __init__(self) -> None:
        self.now = 1e9

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("tqdm.std.time", clock)
    return clock


def test_a_log_gets_a_line_every_ten_seconds_with_the_time_left_at_the_recent_rate(clock, capsys):
    """300 bytes exist. 500 more arrive at 50 per second, then 50 at 1 per second, so the last 150 would take 150 s."""
    with bar.bar("get x", 1000, done=300) as shown:
        for rate, seconds in ((50, 10), (1, 50)):
            for _ in range(seconds):
                clock.now += 1
                shown.update(rate)
    said = capsys.readouterr().err
    lines = said.splitlines()
    assert "\r" not in said and len(lines) == 6
    assert lines[0] == "get x: 800 of 1.00kB (80 %), 50.0B/s, 00:04 left"
    left = [int(minutes) * 60 + int(seconds) for minutes, seconds in re.findall(r"(\d\d):(\d\d) left", said)]
    assert left == sorted(left) and left[-1] == 39, "at the rate since the start it would be 16"


def test_on_a_terminal_one_line_is_drawn_over_and_messages_stay_whole():
    code = """
import logging, time
import fairseq_admin.bar
from recipes.steps import bar
logging.basicConfig(level=logging.INFO, format="%(message)s")
fairseq_admin.bar.SECONDS = 0.01
with bar.bar("get x", 100) as shown:
    for _ in range(4):
        time.sleep(0.01)
        shown.update(25)
        logging.info("a message")
"""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, stderr=theirs, check=True, timeout=60)
    os.close(theirs)
    said = ""
    with suppress(OSError):  # on Linux, reading fails when the other end is closed
        while more := os.read(ours, 1 << 16):
            said += more.decode()
    os.close(ours)
    assert len(re.findall(r"\rget x: +\d+%\|", said)) >= 4
    assert re.findall(r"([^\r\n]*)a message\r\n", said) == [""] * 4, "the bar was wiped before each"
    assert said.endswith("\r") and said.count("\n") == 4, "and at the end"


@pytest.fixture
def steps(tmp_path, monkeypatch, capfd):
    """steps(step, *arguments) -> the bar's last line under each title."""
    monkeypatch.setattr(the_plugins, "SECONDS", 1e-9)
    lines = [" ".join(random.Random(1).choices(["eins", "zwei", "drei"], k=9))] * 20_000
    for language in ("de", "en"):
        write_lines(tmp_path / f"raw.{language}", lines)
    Text("de", "en").write(tmp_path / "text.json")

    def last(step, *arguments: object) -> dict[str, str]:
        step(*arguments)
        return dict(re.findall(r"^(.+): (\S+ of \S+ \(\d+ %\)), \S+, \d\d:\d\d left$", capfd.readouterr().err, re.M))

    return last


def test_every_long_step_reads_n_of_n(steps, tmp_path):
    raw, pair = tmp_path / "raw", [tmp_path / "raw.de", tmp_path / "raw.en"]
    size = bar.tqdm.format_sizeof(2 * pair[0].stat().st_size)
    whole = f"{size} of {size}B (100 %)"
    read = {f"read {pair[0]} {pair[1]}": whole}
    assert steps(pairs.tokenise, tmp_path / "text.json", raw, tmp_path / "tok") == read
    size = bar.tqdm.format_sizeof(pair[0].stat().st_size)
    each = {f"read {path}": f"{size} of {size}B (100 %)" for path in pair}
    assert steps(bpe.write, tmp_path / "codes", pair, 5) == each
    assert steps(bpe.apply, tmp_path / "codes", pair, tmp_path / "bpe") == read
    archive = write_tar(tmp_path / "x.tar", {"text": pair[0].read_bytes(), "more": b"more\n"})
    size = bar.tqdm.format_sizeof(archive.stat().st_size)
    done = steps(extract.extract, archive, ["text"], tmp_path / "extracted")
    assert done == {f"read {archive}": f"{size} of {size}B (100 %)"}
