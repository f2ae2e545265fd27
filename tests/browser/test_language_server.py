"""`examples/language_server`: a page that streams a text, and what ends it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, Literal

import pytest
from playwright.sync_api import Browser, Page, expect

REPOSITORY: Final = Path(__file__).parents[2]
ENDS_S: Final = 120.0
LONG: Final = "50000"  # characters: it is still written when the test does something
FREE: Final = re.compile(r"^0$")
LATER: Final = re.compile(r"^[1-9]\d*$")  # than the version that knows nothing

OpenTab = Callable[..., Page]


class LanguageServer:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        self._process, self._stdout = process, process.stdout
        self.printed: list[str] = []  # the lines it has printed so far
        self.url = self.wait_line(r"serving (http\S+)")[1]  # of the page

    def wait_line(self, pattern: str) -> re.Match[str]:
        """Wait until it prints a line of this form."""
        while line := self._stdout.readline():
            self.printed.append(line)
            if match := re.match(pattern, line):
                return match
        raise AssertionError("the program has ended:\n" + "".join(self.printed))

    def pid(self, name: str) -> int:
        """Return the process of a worker, the last one that was started."""
        pattern = re.compile(rf"{name}: process (\d+)")
        pids = [match[1] for line in self.printed if (match := pattern.match(line))]
        return int(pids[-1])

    def end(self) -> int:
        """End it as a supervisor does; return its exit code."""
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(ENDS_S)


@pytest.fixture(scope="module")
def server() -> Iterator[LanguageServer]:
    command = [sys.executable, "-m", "examples.language_server", "--port", "0"]
    with subprocess.Popen(
        command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            running = LanguageServer(process)
            yield running
            assert running.end() == 0
        finally:
            process.kill()


@pytest.fixture
def open_tab(browser: Browser, server: LanguageServer) -> Iterator[OpenTab]:
    """Opens tabs; none may have a trouble in its console at the end."""
    troubles: list[str] = []
    contexts = []

    def open_tab(**options: Any) -> Page:
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.goto(server.url)
        return page

    yield open_tab
    for context in contexts:
        context.close()
    assert troubles == []


def begin(page: Page, length: str = LONG) -> None:
    """Ask for a text, and wait until the first of it is there."""
    page.get_by_label("Characters", exact=True).fill(length)
    page.get_by_role("button", name="Write").click()
    expect(page.locator("#text .written")).not_to_be_empty()


def expect_nothing_written(page: Page) -> None:
    for name in ("model-0", "model-1"):
        row = page.get_by_role("row").filter(has_text=name)
        expect(row.get_by_role("cell").nth(3)).to_have_text(FREE)


def test_a_text_is_written_to_its_end(open_tab: OpenTab) -> None:
    page = open_tab()
    begin(page, "50")
    expect(page.locator("#outcome")).to_have_text("Done: 50 characters")
    expect(page.locator("#text .prompt")).to_have_text("Alice ")
    assert len(page.locator("#text .written").text_content() or "") == 50
    expect(page.locator("#first")).to_have_text(re.compile(r"^\d+ ms$"))
    expect(page.locator("#version")).to_have_text(re.compile(r"^\d+$"))
    expect(page.locator("#replica")).to_have_text(re.compile(r"^model-[01]$"))


def test_stop_frees_the_place(open_tab: OpenTab) -> None:
    page = open_tab()
    begin(page)
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("#outcome")).to_have_text(re.compile(r"^Stopped after \d+ "))
    expect_nothing_written(page)
    expect(page.get_by_role("button", name="Write")).to_be_enabled()


def test_a_reload_and_a_closed_tab_free_their_places(open_tab: OpenTab) -> None:
    reloaded, closed, watching = open_tab(), open_tab(), open_tab()
    begin(reloaded)
    begin(closed)
    reloaded.reload()
    closed.close()
    expect_nothing_written(watching)
    expect(reloaded.locator("#text")).to_be_empty()


def test_tabs_write_side_by_side(open_tab: OpenTab) -> None:
    tabs = [open_tab() for _ in range(4)]
    for page in tabs:
        begin(page, "300")
    for page in tabs:
        expect(page.locator("#outcome")).to_have_text("Done: 300 characters")


def test_text_continues_on_another_replica_after_a_kill(
    open_tab: OpenTab, server: LanguageServer
) -> None:
    page = open_tab()
    begin(page)
    name = page.locator("#replica").text_content() or ""
    os.kill(server.pid(name), signal.SIGKILL)
    outcome = page.locator("#outcome")
    expect(outcome).to_have_text("The replica was lost; this one goes on")
    expect(page.locator("#replica")).not_to_have_text(name)
    page.get_by_role("button", name="Stop").click()
    server.wait_line(rf"{name}: process (\d+)")
    row = page.get_by_role("row").filter(has_text=name)
    expect(row.get_by_role("cell").nth(1)).to_have_text("ready")
    expect(row.get_by_role("cell").nth(2)).to_have_text(LATER)  # it has caught up


def test_versions_are_rolled_back_by_one_click(open_tab: OpenTab) -> None:
    page = open_tab()
    order = page.locator("#ordered")
    row = page.get_by_role("row").filter(has_text="model-0")
    expect(row.get_by_role("cell").nth(2)).to_have_text(LATER)  # else none is before
    page.get_by_role("button", name="Back to the version before").click()
    expect(order).to_have_text(re.compile(r"^Serving version \d+$"))
    version = (order.text_content() or "").split()[-1]
    begin(page, "20")
    expect(page.locator("#version")).to_have_text(version)
    page.get_by_role("button", name="Serve new versions again").click()
    expect(order).to_have_text("New versions are served again")
    expect(row.get_by_role("cell").nth(2)).to_have_text(LATER)
    expect(row.get_by_role("cell").nth(2)).not_to_have_text(version)


def test_unknown_characters_are_refused_in_words(open_tab: OpenTab) -> None:
    page = open_tab()
    page.get_by_label("Begin a text").fill("Alice § ")
    page.get_by_role("button", name="Write").click()
    expect(page.locator("#outcome")).to_have_text("the model does not know '§'")
    expect(page.get_by_role("button", name="Write")).to_be_enabled()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_fits_a_small_screen(
    open_tab: OpenTab, scheme: Literal["light", "dark"]
) -> None:
    page = open_tab(color_scheme=scheme, viewport={"width": 360, "height": 640})
    expect(page.get_by_role("row")).to_have_count(3)
    wider = "document.documentElement.scrollWidth > innerWidth"
    assert page.evaluate(wider) is False
    ink, paper = page.evaluate(
        "[getComputedStyle(document.body).color,"
        " getComputedStyle(document.body).backgroundColor]"
    )
    darker, lighter = (ink, paper) if scheme == "light" else (paper, ink)
    assert brightness(darker) + 120 < brightness(lighter)


def test_page_works_by_keyboard_alone(open_tab: OpenTab) -> None:
    page = open_tab()
    page.get_by_label("Begin a text").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#text .written")).not_to_be_empty()


def brightness(color: str) -> float:
    """Return the mean of red, green and blue of a color as a browser tells it."""
    parts = [float(part) for part in re.findall(r"[\d.]+", color)[:3]]
    return sum(parts) / len(parts)
