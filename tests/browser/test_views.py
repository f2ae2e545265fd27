"""Each view shows what the group does."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import Open
from tests.browser.groups import ShownGroup
from tests.browser.pages import VIEWS
from tests.browser.programs import HELD, ODD

# Columns of the overview, with how the page writes them.
NUMBERS = {
    "made_per_s": ("Calls made per second", "rate"),
    "served_per_s": ("Calls served per second", "rate"),
    "failed_per_s": ("Calls failed per second", "rate"),
    "p50_s": ("Half of the calls made take at most", "latency"),
    "p99_s": ("99 of 100 calls made take at most", "latency"),
    "bytes_per_s": ("Bytes of the calls made per second", "traffic"),
    "memory_bytes": ("Memory of the process", "bytes"),
    "tasks": ("Tasks", "count"),
    "calls_under_way": ("Calls under way", "count"),
    "references": ("References held", "count"),
}


def test_the_overview_shows_each_worker(busy: ShownGroup, open_page: Open) -> None:
    page = open_page(busy)
    page.open("overview")
    expected = {row["worker"]: row for row in page.stop()["rows"]}
    shown = {row["Worker"]: row for row in page.rows("Workers")}
    assert set(shown) == set(expected) == set(busy.pids)
    for name, row in shown.items():
        assert row["Process"] == str(busy.pids[name])
        assert row["State"] == expected[name]["state"]
        for key, (column, how) in NUMBERS.items():
            assert row[column] == page.written(how, expected[name][key])
    expect(page.page.locator("#group-words")).to_have_text(
        f"All {len(busy.pids)} workers answer"
    )


def test_the_overview_shows_totals_and_their_history(
    busy: ShownGroup, open_page: Open
) -> None:
    page = open_page(busy)
    page.open("overview")
    page.wait_for("look.history.at_s.length > 2")
    look = page.stop()
    totals = page.page.locator(".totals").inner_text()
    assert page.written("rate", look["totals"]["calls_made_per_s"]) in totals
    assert page.written("bytes", look["totals"]["memory_bytes"]) in totals
    chart = page.page.get_by_role("slider", name="Calls made per second")
    points = look["history"]["made_per_s"]
    expect(chart).to_have_attribute("aria-valuemax", str(len(points) - 1))
    chart.focus()
    chart.press("Home")
    first = page.written("rate", points[0])
    expect(chart).to_have_attribute("aria-valuetext", re.compile(f"^{first} at "))
    drawn = chart.locator(".line").get_attribute("d")
    assert drawn is not None
    known = [point for point in points if point is not None]
    assert drawn.count("L") == len(known) - drawn.count("M")


def test_the_overview_shows_links(busy: ShownGroup, open_page: Open) -> None:
    page = open_page(busy)
    page.open("overview")
    look = page.stop()
    names = look["links"]["workers"]
    web, ps = names.index("web"), names.index("ps")
    link = look["links"]["cells"][web][ps]
    cell = page.page.get_by_role("gridcell", name=re.compile("^web to ps: open"))
    words = cell.get_attribute("aria-label")
    assert words is not None
    assert f"traffic {page.written('traffic', link['bytes_per_s'])}" in words
    assert f"calls in flight {page.written('count', link['in_flight'])}" in words


def test_worker_view_shows_its_details(busy: ShownGroup, open_page: Open) -> None:
    page = open_page(busy)
    page.open("worker/ps")
    look = page.stop()
    expect(page.page.locator("h1")).to_have_text("ps")
    assert str(busy.pids["ps"]) in page.page.locator(".facts").first.inner_text()
    functions = {row["Function"]: row for row in page.rows("Functions served")}
    (name,) = (name for name in functions if name.endswith("double"))
    (function,) = (
        candidate for candidate in look["functions"] if candidate["function"] == name
    )
    per_s = functions[name]["Calls served per second"]
    assert per_s == page.written("rate", function["per_s"])
    assert len(page.rows("Tasks")) == min(25, len(look["tasks"]))
    assert len(page.rows("Threads")) == len(look["threads"])
    assert {"web"} <= {row["Peer"] for row in page.rows("Links")}
    assert page.rows("What happened lately")


def test_calls_view_shows_calls_in_flight(busy: ShownGroup, open_page: Open) -> None:
    page = open_page(busy)
    page.open("calls", "?find=never&per_page=200")
    expect(page.table("Calls").locator("tbody tr")).to_have_count(HELD)
    for row in page.rows("Calls"):
        assert (row["Caller"], row["Callee"]) == ("web", "ps")
        assert row["Function"].endswith("never")


def test_references_view_shows_their_holders(busy: ShownGroup, open_page: Open) -> None:
    page = open_page(busy)
    page.open("references", "?find=Table")
    expect(page.table("References").locator("tbody tr")).to_have_count(2)
    rows = page.rows("References")
    assert {row["Owner"] for row in rows} == {"ps", ODD}
    assert {row["Held by"] for row in rows} == {"web"}


def test_training_view_shows_stages_passes_and_steps(
    busy: ShownGroup, open_page: Open
) -> None:
    page = open_page(busy)
    page.open("training")
    expect(page.page.locator(".stage")).to_have_count(2)
    page.wait_for("look.rows.some((row) => row.buckets.length)")
    page.wait_for("look.passes.length > 0 && look.steps.length > 0")
    look = page.stop()
    stages = page.page.locator(".stage-name").all_inner_texts()
    assert stages == ["Stage 0, ps", "Stage 1, trainer"]
    spans = page.page.locator(".stage").first.locator("rect")
    expected = look["pipeline"][0]["spans"]
    expect(spans).to_have_count(sum(span["kind"] != "idle" for span in expected))
    shown = {row["Worker"]: row for row in page.rows("Workers")}
    for row in look["rows"]:
        passes = page.written("rate", row["passes_per_s"])
        assert shown[row["worker"]]["Backward passes per second"] == passes
    buckets = page.rows("Buckets")
    assert {row["Worker"] for row in buckets} == {"ps", "trainer", "web"}
    assert {row["Size"] for row in buckets} == {page.written("bytes", 4 * 5)}
    assert {row["Begun by"] for row in page.rows("Backward passes")} == {"web"}
    assert page.rows("Optimizer steps")[0]["Optimizer"] == "SGD"
    assert page.rows("Optimizer steps")[0]["Parameters on"] == "ps, trainer"


def test_collectives_view_shows_kind_and_ranks(
    busy: ShownGroup, open_page: Open
) -> None:
    page = open_page(busy)
    page.open("collectives")
    expect(page.table("Collectives").locator("tbody tr").first).to_be_visible()
    look = page.stop()
    shown = page.rows("Collectives")
    assert len(shown) == len(look["rows"])
    for row, expected in zip(shown, look["rows"], strict=True):
        assert row["Came"] == page.written("ranks", expected["came"])
        assert row["Kind"] == expected["kind"]


def test_empty_view_says_what_would_fill_it(calm: ShownGroup, open_page: Open) -> None:
    page = open_page(calm)
    for view, words in {
        "calls": "No call is under way",
        "references": "No reference is held",
        "collectives": "No collective was seen",
        "training": "No stage of a pipeline was seen",
        "hangs": "Nothing waits",
    }.items():
        page.open(view)
        expect(page.page.locator("main")).to_contain_text(words)


@pytest.mark.parametrize("view", [*VIEWS, f"worker/{ODD}"])
def test_names_are_text_and_never_markup(
    busy: ShownGroup, open_page: Open, view: str
) -> None:
    """The page of each view is checked for errors, strangers and its policy, too."""
    page = open_page(busy)
    page.open(view)
    assert page.page.locator("main img, main script, main [onerror]").count() == 0
    if view in ("overview", "worker", f"worker/{ODD}"):
        expect(page.page.locator("main").get_by_text(ODD).first).to_be_visible()


def test_unknown_view_or_worker_is_reported(busy: ShownGroup, open_page: Open) -> None:
    page = open_page(busy)
    page.page.goto(f"{busy.url}#/nonsense")
    expect(page.page.locator("h1")).to_have_text("No such view")
    page.page.goto(f"{busy.url}#/worker/nobody")
    assert "nobody" in page.alert()
    assert page.troubles.pop().endswith("404 (Not Found)")
    page.troubles.clear()  # the stream, and the question why it ended
