"""All of a page is reached by keys, and has a name for who does not see it."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import Open
from tests.browser.groups import ShownGroup
from tests.browser.pages import VIEWS, DashboardPage

# What a reader announces with its role must have a name.
NAMED = {
    "button", "checkbox", "columnheader", "combobox", "figure", "grid", "gridcell",
    "link", "navigation", "region", "rowheader", "searchbox", "slider", "table",
}  # fmt: skip


def focused(page: DashboardPage) -> str:
    """Return what has the focus, by its text or its label."""
    text: str = page.page.evaluate(
        "document.activeElement.getAttribute('aria-label') ||"
        "document.activeElement.labels?.[0]?.textContent ||"
        "document.activeElement.textContent"
    )
    return text.strip()


def test_tab_goes_from_the_top_to_the_table(busy: ShownGroup, open_page: Open) -> None:
    page = open_page(busy)
    page.open("overview")
    way = []
    for _ in range(60):
        page.page.keyboard.press("Tab")
        way.append(focused(page))
        if way[-1].startswith("web to "):
            break
    expected = [
        "Skip to the content", "asyncrpc", f"All {len(busy.pids)} workers answer",
        "Pause", "Sign out", "Overview", "Worker", "Calls", "References", "Training",
        "Collectives", "Hangs",
    ]  # fmt: skip
    assert way[: len(expected)] == expected
    after = way[len(expected) :]
    for stop in ("Calls made per second, over the last minutes", "Find", "State"):
        assert stop in after
    assert way[-1].startswith("web to "), "the matrix is one stop"


def test_skip_leads_to_the_content(busy: ShownGroup, open_page: Open) -> None:
    page = open_page(busy)
    page.open("calls")
    page.page.keyboard.press("Tab")
    skip = page.page.get_by_role("link", name="Skip to the content")
    expect(skip).to_be_focused()
    expect(skip).to_be_in_viewport()
    page.page.keyboard.press("Enter")
    expect(page.page.locator("main")).to_be_focused()
    expect(page.page).to_have_url(re.compile("#/calls$"))


def test_focused_element_has_an_outline(busy: ShownGroup, open_page: Open) -> None:
    """At each stop of Tab, at least two pixels wide."""
    page = open_page(busy)
    page.open("overview")
    for _ in range(40):
        page.page.keyboard.press("Tab")
        outline = page.page.evaluate(
            "(({outlineStyle, outlineWidth}) => [outlineStyle, outlineWidth])"
            "(getComputedStyle(document.activeElement))"
        )
        assert outline == ["solid", "2px"], focused(page)


def test_enter_sorts_a_table(busy: ShownGroup, open_page: Open) -> None:
    page = open_page(busy)
    page.open("overview")
    button = page.table("Workers").get_by_role("button", name="Worker")
    button.focus()
    page.page.keyboard.press("Enter")
    head = page.table("Workers").get_by_role("columnheader", name="Worker")
    expect(head).to_have_attribute("aria-sort", "ascending")
    expect(button).to_be_focused()
    page.page.keyboard.press("Enter")
    expect(head).to_have_attribute("aria-sort", "descending")


def test_a_view_is_chosen_by_keys_and_takes_the_focus(
    busy: ShownGroup, open_page: Open
) -> None:
    page = open_page(busy)
    page.open("overview")
    link = page.page.get_by_role("link", name="References")
    link.focus()
    page.page.keyboard.press("Enter")
    expect(page.page.get_by_role("heading", level=1)).to_be_focused()
    expect(link).to_have_attribute("aria-current", "page")
    expect(page.page.locator("[aria-current]")).to_have_count(1)
    expect(page.page).to_have_title("References · asyncrpc dashboard")


def test_arrows_go_from_cell_to_cell(busy: ShownGroup, open_page: Open) -> None:
    page = open_page(busy)
    page.open("overview")
    names = page.stop()["links"]["workers"]
    page.page.locator(".matrix [data-at='0 1']").focus()
    caption = page.page.locator("#link-told")
    expect(caption).to_have_text(re.compile(f"^{re.escape(names[0])} to {names[1]}: "))
    page.page.keyboard.press("ArrowDown")
    expect(caption).to_have_text(f"{names[1]} itself")
    page.page.keyboard.press("ArrowDown")
    page.page.keyboard.press("ArrowLeft")
    assert focused(page).startswith(f"{names[2]} to {names[0]}")
    page.page.keyboard.press("Home")
    page.page.keyboard.press("ArrowLeft")  # at the edge it stays
    assert focused(page).startswith(f"{names[2]} to {names[0]}")
    page.page.keyboard.press("Control+End")
    assert focused(page).startswith(names[-1])
    expect(page.page.locator(".matrix [tabindex='0']")).to_have_count(1)


def test_arrows_read_a_chart(busy: ShownGroup, open_page: Open) -> None:
    page = open_page(busy)
    page.open("overview")
    page.wait_for("look.history.at_s.length > 3")
    look = page.stop()
    chart = page.page.get_by_role("slider", name="Memory")
    chart.focus()
    last = len(look["history"]["at_s"]) - 1
    for key, place in (
        ("Home", 0),
        ("ArrowRight", 1),
        ("End", last),
        ("ArrowLeft", last - 1),
    ):
        page.page.keyboard.press(key)
        expect(chart).to_have_attribute("aria-valuenow", str(place))
        value = page.written("bytes", look["history"]["memory_bytes"][place])
        expect(chart).to_have_attribute("aria-valuetext", re.compile(f"^{value} at "))


@pytest.mark.parametrize("view", VIEWS)
def test_controls_have_names(busy: ShownGroup, open_page: Open, view: str) -> None:
    """The names that Chromium gives to a screen reader."""
    page = open_page(busy)
    page.open(view)
    page.stop()
    nodes = accessibility_tree(page)
    nameless = [role for role, name, _ in nodes if role in NAMED and not name]
    assert nameless == []
    roles = [role for role, _, _ in nodes]
    for landmark in ("banner", "main", "navigation", "heading"):
        assert landmark in roles
    assert roles.count("main") == 1
    levels = [level for role, _, level in nodes if role == "heading"]
    assert levels.count(1) == 1
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))


def accessibility_tree(page: DashboardPage) -> list[tuple[str, str, Any]]:
    """Return roles, names and levels of what a screen reader is told."""
    session = page.page.context.new_cdp_session(page.page)
    nodes = session.send("Accessibility.getFullAXTree")["nodes"]
    session.detach()
    entries = []
    for node in nodes:
        if node.get("ignored"):
            continue
        more = {item["name"]: item["value"].get("value") for item in node["properties"]}
        name = node.get("name", {}).get("value", "")
        entries.append((node["role"]["value"], name, more.get("level")))
    return entries


def test_rows_and_columns_have_headers(busy: ShownGroup, open_page: Open) -> None:
    page = open_page(busy)
    page.open("overview")
    table = page.table("Workers")
    row = table.get_by_role("row", name=re.compile("^web "))
    expect(row.get_by_role("rowheader", name="web")).to_be_visible()
    expect(
        table.get_by_role("columnheader", name="Calls made per second", exact=True)
    ).to_be_visible()


def test_changing_numbers_are_not_announced(busy: ShownGroup, open_page: Open) -> None:
    page = open_page(busy)
    page.open("overview")
    seen = page.page.evaluate("looks.length")
    page.wait_for(f"looks.length > {seen + 3}")
    expect(page.page.get_by_role("status")).to_have_text("")
    live = page.page.locator("[aria-live]:not([aria-live=off]), [role=log]")
    expect(live).to_have_count(0)


@pytest.mark.parametrize("motion", ["reduce", "no-preference"])
def test_motion_is_reduced_on_request(
    busy: ShownGroup, open_page: Open, motion: str
) -> None:
    page = open_page(busy, reduced_motion=motion)
    page.open("overview")
    moving = page.page.evaluate(
        "[...document.querySelectorAll('*')].filter((node) => {"
        "const style = getComputedStyle(node);"
        "return style.transitionDuration !== '0s' || style.animationName !== 'none';"
        "}).map((node) => node.className)"
    )
    assert moving == ([] if motion == "reduce" else ["skip"])
