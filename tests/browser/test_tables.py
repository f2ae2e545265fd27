"""Tables are sorted, paged and searched, and an address says how."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import Open
from tests.browser.groups import ShownGroup
from tests.browser.pages import DashboardPage
from tests.browser.programs import HELD, ODD

NAMES = [ODD, "ps", "trainer", "web"]


def expect_workers(page: DashboardPage, names: list[str]) -> None:
    shown = page.table("Workers").locator("tbody th")
    expect(shown).to_have_text(names)


def test_a_head_sorts_and_sorts_back(busy: ShownGroup, open_page: Open) -> None:
    page = open_page(busy)
    page.open("overview")
    head = page.table("Workers").get_by_role("columnheader", name="Worker")
    head.get_by_role("button").click()
    expect(head).to_have_attribute("aria-sort", "ascending")
    expect_workers(page, NAMES)
    head.get_by_role("button").click()
    expect(head).to_have_attribute("aria-sort", "descending")
    expect_workers(page, NAMES[::-1])
    expect(page.table("Workers").locator("[aria-sort]")).to_have_count(1)


def test_numbers_are_sorted_from_the_largest(busy: ShownGroup, open_page: Open) -> None:
    page = open_page(busy)
    page.open("overview")
    head = page.table("Workers").get_by_role("columnheader", name="Rank")
    head.get_by_role("button").click()
    expect(head).to_have_attribute("aria-sort", "descending")
    expect_workers(page, [ODD, "trainer", "ps", "web"])
    expect(page.page.locator("#said")).to_have_text("Sorted by Rank, largest first")


def test_address_holds_the_view_and_back_restores_it(
    busy: ShownGroup, open_page: Open
) -> None:
    page = open_page(busy)
    page.open("overview", "?sort=worker&order=down&find=er")
    expect_workers(page, ["trainer", ODD])
    find = page.page.get_by_role("searchbox", name="Find")
    expect(find).to_have_value("er")
    page.table("Workers").get_by_role("button", name="Worker").click()
    expect_workers(page, [ODD, "trainer"])
    expect(page.page).to_have_url(re.compile(r"sort=worker&order=up&find=er$"))
    page.page.go_back()
    expect_workers(page, ["trainer", ODD])
    page.page.reload()
    expect_workers(page, ["trainer", ODD])


def test_find_filters_while_typing(busy: ShownGroup, open_page: Open) -> None:
    page = open_page(busy)
    page.open("overview")
    find = page.page.get_by_role("searchbox", name="Find")
    find.press_sequentially("<img")
    expect_workers(page, [ODD])
    expect(find).to_be_focused()
    find.fill("nobody is called this")
    expect(page.page.locator("main")).to_contain_text(
        'Nothing has "nobody is called this" in it.'
    )
    expect(find).to_be_focused()
    find.fill("")
    expect(page.table("Workers").locator("tbody tr")).to_have_count(len(NAMES))


def test_table_is_paged(busy: ShownGroup, open_page: Open) -> None:
    page = open_page(busy)
    page.open("calls", "?find=never&per_page=10")
    pages = page.page.get_by_role("navigation", name="Pages of Calls")
    expect(pages).to_contain_text(f"1 to 10 of {HELD}")
    seen = {row["Call"] for row in page.rows("Calls")}
    for rows, button in (("11 to 20", "Next"), ("31 to 40", "Last")):
        pages.get_by_role("button", name=button).click()
        expect(pages).to_contain_text(f"{rows} of {HELD}")
        seen |= {row["Call"] for row in page.rows("Calls")}
    following = pages.get_by_role("button", name="Next")
    expect(following).to_have_attribute("aria-disabled", "true")
    pages.get_by_role("button", name="Previous").click()
    expect(pages).to_contain_text(f"21 to 30 of {HELD}")
    seen |= {row["Call"] for row in page.rows("Calls")}
    assert len(seen) == HELD
    pages.get_by_role("button", name="First").click()
    expect(pages).to_contain_text(f"1 to 10 of {HELD}")
    pages.get_by_role("combobox", name="Rows").select_option("100")
    expect(page.table("Calls").locator("tbody tr")).to_have_count(HELD)


def test_focus_and_selection_survive_a_look(busy: ShownGroup, open_page: Open) -> None:
    page = open_page(busy)
    page.open("overview", "?sort=made_per_s&order=down")
    link = page.table("Workers").get_by_role("link", name="ps")
    link.focus()
    page.page.evaluate(
        "getSelection().selectAllChildren(document.querySelector('tbody th'))"
    )
    chosen = page.page.evaluate("getSelection().toString()")
    seen = page.page.evaluate("looks.length")
    page.wait_for(f"looks.length > {seen + 3}")
    expect(link).to_be_focused()
    assert page.page.evaluate("getSelection().toString()") == chosen


def test_small_tables_are_sorted_by_their_own_names(
    busy: ShownGroup, open_page: Open
) -> None:
    page = open_page(busy)
    page.open("worker/web")
    table = page.table("Links")
    head = table.get_by_role("columnheader", name="Peer", exact=True)
    head.get_by_role("button").click()
    ends = table.locator("tbody th")
    expect(ends.first).to_have_text(ODD)
    expect(ends.last).to_have_text("web")  # a worker has a link to itself, too
    head.get_by_role("button").click()
    expect(ends.first).to_have_text("web")
    expect(ends.last).to_have_text(ODD)
    expect(page.page).to_have_url(re.compile(r"links\.sort=peer&links\.order=down"))


def test_invalid_query_is_refused_in_words(busy: ShownGroup, open_page: Open) -> None:
    page = open_page(busy)
    page.page.goto(f"{busy.url}#/overview?sort=nonsense")
    assert "nonsense" in page.alert()
    assert all("400" in trouble for trouble in page.troubles)
    page.troubles.clear()


@pytest.mark.parametrize("view", ["overview", "calls"])
def test_page_shows_the_number_of_rows(
    busy: ShownGroup, open_page: Open, view: str
) -> None:
    page = open_page(busy)
    page.open(view)
    look = page.stop()
    expect(page.page.locator(".amount").first).to_have_text(str(look["total"]))
