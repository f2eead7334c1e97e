"""The bar of a long step. On a terminal, it is one line that is redrawn; in a log, it is several lines."""

from __future__ import annotations

import logging
import re
import sys

import pytest

from recipes.steps import bar


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
    log = capsys.readouterr().err
    lines = log.splitlines()
    assert "\r" not in log and len(lines) == 6
    assert lines[0] == "get x: 800 of 1.00kB (80 %), 50.0B/s, 00:04 left"
    left = [int(minutes) * 60 + int(seconds) for minutes, seconds in re.findall(r"(\d\d):(\d\d) left", log)]
    assert left == sorted(left) and left[-1] == 39, "at the rate since the start it would be 16"


def test_on_a_terminal_messages_stay_whole(clock, capsys, monkeypatch):
    """On a terminal, each state is drawn over the last one, and a message wipes the bar first."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(logging.root, "handlers", [logging.StreamHandler(sys.stderr)])
    with bar.bar("get x", 100) as shown:
        for _ in range(4):
            clock.now += 10
            shown.update(25)
            logging.warning("a message")
    output = capsys.readouterr().err
    assert len(re.findall(r"\rget x: +\d+%\|", output)) >= 4
    assert re.findall(r"([^\r\n]*)a message\n", output) == [""] * 4 and output.count("\n") == 4
