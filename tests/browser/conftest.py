"""Tests of the dashboard's pages: a real browser, and groups of real workers.

The browser and the group that most tests look at are kept for the session; a test that
changes its group has one of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest
from playwright.sync_api import Browser, expect, sync_playwright

from tests.browser.groups import ShownGroup, running
from tests.browser.pages import HANGS_MS, DashboardPage, sign_in

CHROMIUM: Final = "/usr/bin/chromium"
# A name that leads here, and that the browser takes for another host.
ELSEWHERE: Final = "dashboard.test"

Open = Callable[..., DashboardPage]


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    arguments = [f"--host-resolver-rules=MAP {ELSEWHERE} 127.0.0.1"]
    if os.geteuid() == 0:
        arguments.append("--no-sandbox")  # which another user would have
    expect.set_options(timeout=HANGS_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ShownGroup]:
    """A group that does something of every kind; it is not to be changed."""
    with running("busy", tmp_path_factory.mktemp("busy")) as group:
        yield group


@pytest.fixture(scope="session")
def dozen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ShownGroup]:
    """A group of twelve workers; it is not to be changed."""
    with running("dozen", tmp_path_factory.mktemp("dozen")) as group:
        yield group


@pytest.fixture(scope="session")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ShownGroup]:
    """A group of forty workers without a secret; it is not to be changed."""
    with running("crowd", tmp_path_factory.mktemp("crowd")) as group:
        yield group


@pytest.fixture
def calm(tmp_path: Path) -> Iterator[ShownGroup]:
    """A group that does nothing."""
    with running("calm", tmp_path) as group:
        yield group


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Open]:
    """Open pages, signed in; check each at the end."""
    with ExitStack() as stack:

        def open_page(
            group: ShownGroup | str, *, is_signed_in: bool = True, **options: Any
        ) -> DashboardPage:
            url = group if isinstance(group, str) else group.url
            context = browser.new_context(**options)
            stack.callback(context.close)
            if is_signed_in:
                sign_in(context, url)
            page = DashboardPage(context, url)
            stack.callback(page.check)
            return page

        yield open_page
