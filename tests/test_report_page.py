"""The report in a browser: drawn, readable on a phone, silent, and asking the network for nothing."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_report import folders, written  # noqa: F401

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip(f"no browser is installed: {', '.join(BROWSERS)}")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def opened(browser: Any, written: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Any, list[str]]]:  # noqa: F811
    """The page at a width and in a colour scheme, and all that it says to the console or asks for."""
    width, scheme = getattr(request, "param", (1280, "light"))
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    page, told = context.new_page(), []
    page.on("console", lambda message: told.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: told.append(f"error: {error}"))
    page.on("request", lambda asked: told.append(asked.url))
    page.goto(written.as_uri())
    page.wait_for_selector("html[data-ready]", timeout=60_000)
    yield page, told
    context.close()


@pytest.mark.parametrize("opened", [(390, "light"), (390, "dark"), (1280, "light"), (1280, "dark")], indirect=True)
def test_page_at_every_width_and_in_every_light(opened: tuple[Any, list[str]], written: Path) -> None:  # noqa: F811
    """Every chart drawn and within the window, no sideways scroll, nothing but the file asked for, no text run."""
    page, told = opened
    assert told == [written.as_uri()]
    assert page.title() == "admin-cpu-s1, bare: fairseq-admin report"
    width = page.viewport_size["width"]
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    drawn = page.evaluate("[...document.querySelectorAll('.chart')].map(it => it.querySelector('svg .marks, svg')"
                          "?.getBoundingClientRect()).map(it => it && [it.left, it.right, it.height])")  # fmt: skip
    assert len(drawn) == 6
    for left, right, height in drawn:
        assert 0 <= left < right <= width and height > 200
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    ink = page.evaluate("getComputedStyle(document.querySelector('.role-axis-label text')).fill")
    dark = page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
    assert (sum(map(int, paper[4:-1].split(", "))) < 200) == dark and (
        sum(map(int, ink[4:-1].split(", "))) > 400
    ) == dark


def test_a_run_is_switched_off_everywhere(opened: tuple[Any, list[str]]) -> None:
    """Its lines, its columns, its own charts; and on again."""
    page, told = opened
    lines = "document.querySelectorAll('#chart-2 .mark-line path').length"
    columns = "[...document.querySelectorAll('#glance thead th')].filter(it => it.offsetParent).length"
    maps = "[...document.querySelectorAll('#dependency figure')].filter(it => it.offsetParent).length"
    assert [page.evaluate(it) for it in (lines, columns, maps)] == [2, 3, 1]
    page.click("#switches input >> nth=0")
    page.wait_for_function(f"{lines} == 1")
    assert [page.evaluate(it) for it in (columns, maps)] == [2, 0]
    page.click("#switches input >> nth=0")
    page.wait_for_function(f"{lines} == 2")
    assert [page.evaluate(it) for it in (columns, maps)] == [3, 1] and len(told) == 1


def test_hovering_tells_the_values(opened: tuple[Any, list[str]]) -> None:
    page, _ = opened
    chart = page.locator("#chart-2 svg")
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    page.mouse.move(box["x"] + box["width"] - 25, box["y"] + 120)
    page.wait_for_selector("#vg-tooltip-element.visible")
    told = page.locator("#vg-tooltip-element").inner_text().split()
    assert told == ["run", "admin-cpu-s1", "update", "30", "perplexity", "2"]
