"""The report in a browser: it draws, fits a phone, logs no errors, and makes no network requests."""

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
    """The page at a width and in a colour scheme, with its console messages and requests."""
    width, scheme = getattr(request, "param", (1280, "light"))
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    page, messages = context.new_page(), []
    page.on("console", lambda message: messages.append(f"{message.type}: {message.text}"))
    page.on("request", lambda asked: messages.append(asked.url))
    page.goto(written.as_uri())
    yield page, messages
    context.close()


@pytest.mark.parametrize("opened", [(390, "light"), (390, "dark"), (1280, "light"), (1280, "dark")], indirect=True)
def test_page_at_every_width_and_in_every_light(opened: tuple[Any, list[str]], written: Path) -> None:  # noqa: F811
    """It draws every figure, never scrolls sideways, requests only its file, and follows the reader's colour scheme."""
    page, messages = opened
    assert messages == [written.as_uri()]
    assert page.title() == "admin-cpu-s1, bare: fairseq-admin report"
    assert page.evaluate("document.documentElement.scrollWidth") <= page.viewport_size["width"]
    heights = page.evaluate("[...document.querySelectorAll('figure svg')].map(it => it.getBoundingClientRect().height)")
    assert len(heights) == 4 and min(heights) > 150
    dark = page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    ink = page.evaluate("getComputedStyle(document.querySelector('figure svg text')).fill")
    assert [sum(map(int, colour[4:-1].split(", "))) > 400 for colour in (paper, ink)] == [not dark, dark]


def test_a_run_is_switched_off_everywhere(opened: tuple[Any, list[str]]) -> None:
    """A switch hides a run's lines, columns and own figures, and shows them again."""
    page, _ = opened

    def shown() -> list[int]:
        parts = ("#curves svg [id^=run-]", "#glance thead th", "#dependency figure")
        return [page.locator(f"{part}:visible").count() for part in parts]

    assert shown() == [4, 3, 1]
    page.click("#show-0")
    assert shown() == [2, 2, 0]
    page.click("#show-0")
    assert shown() == [4, 3, 1]
