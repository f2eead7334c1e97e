"""The bar of a long step. On a terminal, it is one line that is redrawn; in a log, it is several lines."""

from __future__ import annotations

import re

from recipes.steps import bar


def test_a_log_gets_a_line_every_ten_seconds_with_the_time_left_at_the_recent_rate(capsys, monkeypatch):
    """300 bytes exist. 500 more arrive at 50 per second, then 50 at 1 per second, so the last 150 would take 150 s."""
    now = [1e9]
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    with bar.bar("get x", 1000, done=300) as shown:
        for rate, seconds in ((50, 10), (1, 50)):
            for _ in range(seconds):
                now[0] += 1
                shown.update(rate)
    log = capsys.readouterr().err
    lines = log.splitlines()
    assert "\r" not in log and len(lines) == 6
    assert lines[0] == "get x: 800 of 1.00kB (80 %), 50.0B/s, 00:04 left"
    left = [int(minutes) * 60 + int(seconds) for minutes, seconds in re.findall(r"(\d\d):(\d\d) left", log)]
    assert left == sorted(left) and left[-1] == 39, "at the rate since the start it would be 16"
