"""Groups of more than 8 workers, whose matrix is compact, and of more than 32."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import ELSEWHERE, Open
from tests.browser.groups import ShownGroup
from tests.browser.pages import VIEWS, DashboardPage
from tests.browser.test_appearance import AA, AA_LARGE, SIZES, TEXTS, contrast
from tests.browser.test_keyboard import NAMED, accessibility_tree, focused

MATRIX_MAX = 32
VIEWS_OF_CROWD = [view if view != "worker/ps" else "worker/w01" for view in VIEWS]


def cells(page: DashboardPage) -> list[dict[str, Any]]:
    """Return the cells of the matrix, row by row."""
    drawn: list[dict[str, Any]] = page.page.locator(".matrix [data-at]").evaluate_all(
        "cells => cells.map((cell) => ({"
        "label: cell.getAttribute('aria-label'), text: cell.innerText.trim(),"
        "level: cell.dataset.level ?? null, isSelf: 'self' in cell.dataset,"
        "width: cell.getBoundingClientRect().width,"
        "height: cell.getBoundingClientRect().height,"
        "}))"
    )
    return drawn


# --- more than 8 ---------------------------------------------------------------------


def test_the_matrix_of_a_dozen_has_shades_and_no_numbers(
    dozen: ShownGroup, open_page: Open
) -> None:
    page = open_page(dozen)
    page.open("overview")
    page.wait_for("look.links.cells[0][1]?.calls_per_s > 0")
    look = page.stop()
    names = look["links"]["workers"]
    assert len(names) == 12
    drawn_cells = cells(page)
    assert len(drawn_cells) == 12 * 12
    assert {cell["text"] for cell in drawn_cells} == {""}
    sizes = {(cell["width"], cell["height"]) for cell in drawn_cells}
    assert len(sizes) == 1  # all alike
    for place, cell in enumerate(drawn_cells):
        row, column = divmod(place, 12)
        link = look["links"]["cells"][row][column]
        assert cell["isSelf"] == (row == column)
        assert (cell["level"] is None) == (link is None)
        start = f"{names[row]} itself" if row == column else f"{names[row]} to "
        assert cell["label"].startswith(start)
    expect(page.page.locator(".matrix.wide")).to_have_count(0)
    expect(page.page.locator(".links .note")).to_be_hidden()


def test_link_of_the_compact_matrix_is_described_in_words(
    dozen: ShownGroup, open_page: Open
) -> None:
    page = open_page(dozen)
    page.open("overview")
    page.wait_for("look.links.cells[0][1]?.calls_per_s > 0")
    look = page.stop()
    traffic = look["links"]["cells"][0][1]
    cell = page.page.get_by_role("gridcell", name=re.compile("^w00 to w01: open"))
    cell.hover()
    line = page.page.locator("#link-told")
    expect(line).to_contain_text("w00 to w01: open")
    expect(line).to_contain_text(page.written("traffic", traffic["bytes_per_s"]))
    choice = page.page.get_by_label("Shade by")
    choice.select_option("in_flight")
    expect(page.page.locator(".legend")).to_contain_text("Shade: 0")
    levels = {shade["label"][:10]: shade["level"] for shade in cells(page)}
    assert levels["w00 to w01"] == "4"  # its call is the only one under way
    assert levels["w01 to w02"] == "0"


# --- more than 32 --------------------------------------------------------------------


def test_matrix_of_forty_workers_shows_32(crowd: ShownGroup, open_page: Open) -> None:
    page = open_page(crowd, is_signed_in=False)
    page.open("overview")
    look = page.stop()
    assert len(page.rows("Workers")) == 40
    assert look["links"]["workers"] == [f"w{number:02}" for number in range(MATRIX_MAX)]
    assert len(cells(page)) == MATRIX_MAX**2
    note = page.page.locator(".links .note")
    expect(note).to_have_text(
        "8 workers left out: the matrix has those of this page of the table, and 32 at "
        "most."
    )


def test_the_matrix_is_of_the_workers_of_the_page(
    crowd: ShownGroup, open_page: Open
) -> None:
    page = open_page(crowd, is_signed_in=False)
    page.open("overview", "?per_page=10&page=4&sort=worker&order=up")
    names = [f"w{number}" for number in range(30, 40)]
    heads = page.page.locator(".matrix tbody th")
    expect(heads).to_have_text(names)
    expect(page.page.locator(".links .note")).to_contain_text("30 workers left out")
    page.page.get_by_role("searchbox", name="Find").first.fill("w03")
    expect(page.page.locator(".links .empty")).to_contain_text("One worker has no link")
    expect(page.page.locator(".matrix")).to_be_hidden()


def test_arrows_go_through_the_large_matrix_and_tab_past_it(
    crowd: ShownGroup, open_page: Open
) -> None:
    page = open_page(crowd, is_signed_in=False)
    page.open("overview")
    page.stop()
    page.page.locator(".matrix [data-at='0 1']").focus()
    caption = page.page.locator("#link-told")
    page.page.keyboard.press("Control+End")
    expect(caption).to_have_text("w31 itself")
    assert focused(page) == "w31 itself"
    expect(page.page.locator(":focus")).to_be_in_viewport()
    page.page.keyboard.press("PageUp")
    page.page.keyboard.press("ArrowRight")  # at the edge it stays
    expect(caption).to_have_text(re.compile("^w00 to w31: "))
    page.page.keyboard.press("Home")
    expect(caption).to_have_text("w00 itself")
    expect(page.page.locator(".matrix [tabindex='0']")).to_have_count(1)
    page.page.keyboard.press("Tab")
    outside = "document.activeElement.closest('.matrix tbody [data-at]') === null"
    assert page.page.evaluate(outside)


@pytest.mark.parametrize("view", VIEWS_OF_CROWD)
def test_controls_of_a_crowd_have_names(
    crowd: ShownGroup, open_page: Open, view: str
) -> None:
    """The names that Chromium gives to a screen reader."""
    page = open_page(crowd, is_signed_in=False)
    page.open(view)
    page.stop()
    nodes = accessibility_tree(page)
    nameless = [role for role, name, _ in nodes if role in NAMED and not name]
    assert nameless == []
    levels = [level for role, _, level in nodes if role == "heading"]
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    if view == "overview":
        cell_names = [name for role, name, _ in nodes if role == "gridcell"]
        assert "from \\ to" in cell_names  # the corner
        assert len(cell_names) == len(set(cell_names)) == 1 + MATRIX_MAX**2


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("view", ["overview", "calls"])
def test_texts_of_a_crowd_have_enough_contrast(
    crowd: ShownGroup, open_page: Open, view: str, scheme: str
) -> None:
    page = open_page(crowd, is_signed_in=False, color_scheme=scheme)
    page.open(view)
    page.stop()
    pale = {
        entry["text"]: round(contrast(entry), 2)
        for entry in page.page.evaluate(TEXTS)
        if contrast(entry) < (AA_LARGE if entry["isLarge"] else AA)
    }
    assert pale == {}


@pytest.mark.parametrize("size", SIZES)
def test_page_with_a_large_matrix_does_not_scroll_sideways(
    crowd: ShownGroup, open_page: Open, size: str
) -> None:
    width, height = SIZES[size]
    viewport = {"width": width, "height": height}
    page = open_page(crowd, is_signed_in=False, viewport=viewport)
    page.open("overview")
    page.stop()
    assert page.page.evaluate("document.documentElement.scrollWidth") <= width
    for cell in cells(page):
        assert cell["width"] >= 14  # can be pointed at
        assert cell["height"] >= 14


# --- a group without a secret --------------------------------------------------------


def test_a_group_without_a_secret_is_shown_on_this_host_at_once(
    crowd: ShownGroup, open_page: Open
) -> None:
    page = open_page(crowd, is_signed_in=False)
    page.page.goto(crowd.url)
    expect(page.page.locator("h1")).to_have_text("Overview")
    page.wait_for_look()
    expect(page.page.locator("#group-words")).to_have_text("All 40 workers answer")
    expect(page.page.get_by_role("button", name="Sign out")).to_be_hidden()
    assert page.page.context.cookies() == []


def test_foreign_host_name_is_refused_with_a_reason(
    crowd: ShownGroup, open_page: Open
) -> None:
    """A page of a stranger whose name leads here sends that name."""
    url = crowd.url.replace("127.0.0.1", ELSEWHERE)
    page = open_page(url, is_signed_in=False)
    page.page.goto(f"{url}#/calls")
    heading = page.page.get_by_role("heading", level=1)
    expect(heading).to_have_text("You may not look")
    expect(heading).to_be_focused()
    alert = page.alert()
    assert alert.startswith("this group has no secret")
    assert "give it a token, or connect from loopback" in alert
    expect(page.page.locator("table")).to_have_count(0)
    # What the browser says of a header that counts for HTTPS alone.
    assert all("Cross-Origin-Opener-Policy" in trouble for trouble in page.troubles)
    page.troubles.clear()
