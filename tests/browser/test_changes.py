"""What changes while one looks is shown without a reload."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import Open
from tests.browser.groups import ShownGroup, running, served_from_outside
from tests.browser.pages import DashboardPage
from tests.browser.programs import SECRET, TOKEN
from tests.commands import run_to_end


def state_of(page: DashboardPage, worker: str) -> str:
    row = next(row for row in page.rows("Workers") if row["Worker"] == worker)
    return row["State"]


def test_killed_worker_is_shown_as_gone(calm: ShownGroup, open_page: Open) -> None:
    page, other = open_page(calm), open_page(calm)
    page.open("overview")
    other.open("worker/ps")
    expect(other.page.locator(".worker-state")).to_contain_text("well")
    assert state_of(page, "ps") == "well"
    page.page.evaluate("globalThis.isTheSamePage = true")
    os.kill(calm.pids["ps"], signal.SIGKILL)
    words = page.page.locator("#group-words")
    expect(words).to_have_text("2 of 3 workers answer, 1 silent")
    row = page.table("Workers").get_by_role("row", name=re.compile("^ps "))
    expect(row.locator(".state")).to_have_text(re.compile("stopped|silent"))
    expect(row.locator(".state")).to_have_attribute("data-tone", "bad")
    expect(page.page.get_by_role("status")).to_have_text(
        re.compile("^no answer from ps")
    )
    page.page.locator("#group summary").click()
    expect(page.page.locator("#group-list")).to_contain_text("ps its process is gone")
    expect(other.page.locator(".worker-state")).to_contain_text("its process is gone")
    assert page.page.evaluate("isTheSamePage")


def test_stopped_worker_is_shown_and_recovers(
    calm: ShownGroup, open_page: Open
) -> None:
    page = open_page(calm)
    page.open("overview")
    row = page.table("Workers").get_by_role("row", name=re.compile("^trainer "))
    expect(row.locator(".state")).to_have_text("well")
    os.kill(calm.pids["trainer"], signal.SIGSTOP)
    try:
        expect(row.locator(".state")).to_have_text(re.compile("stopped|silent"))
        expect(page.page.locator("#group-list")).to_contain_text("trainer")
    finally:
        os.kill(calm.pids["trainer"], signal.SIGCONT)
    expect(row.locator(".state")).to_have_text("well")
    expect(page.page.get_by_role("status")).to_have_text("trainer is silent no more")


def test_pause_stops_looks_until_it_is_over(busy: ShownGroup, open_page: Open) -> None:
    page = open_page(busy)
    page.open("overview")
    page.stop()
    seen = page.page.evaluate("looks.length")
    streams = page.page.evaluate("performance.getEntriesByType('resource').length")
    page.page.get_by_role("button", name="Pause").click()
    expect(page.page.locator("#live")).to_have_text(re.compile(r"Live, \d"))
    page.wait_for(f"looks.length > {seen}")
    assert (
        page.page.evaluate("performance.getEntriesByType('resource').length") >= streams
    )


# --- the server ----------------------------------------------------------------------


def test_lost_server_is_reported_and_reconnected(
    calm: ShownGroup, open_page: Open
) -> None:
    with served_from_outside(calm) as (first, url):
        page = open_page(url)
        page.open("worker", "?sort=worker&order=down")
        expect(page.table("Workers").locator("tbody tr")).to_have_count(3)
        first.kill()
        first.wait()
        lost = page.page.locator("#lost")
        expect(lost).to_contain_text("The dashboard's server does not answer.")
        expect(lost).to_contain_text(re.compile(r"What you see is of \d\d:\d\d:\d\d\."))
        expect(page.page.locator("#live")).to_have_text("Not connected")
        status = page.page.get_by_role("status")
        expect(status).to_have_text("Connection lost; what is shown is old.")
        expect(page.table("Workers").locator("tbody tr")).to_have_count(3)
        port = int(url.rstrip("/").rpartition(":")[2])
        with served_from_outside(calm, port):
            # Sessions ended with the server, and the view is as it was.
            page.page.get_by_label("token").fill(TOKEN)
            page.page.get_by_role("button", name="Sign in").click()
            expect(page.page.locator("#live")).to_have_text(re.compile(r"Live, \d"))
            expect(lost).to_be_hidden()
            heads = page.table("Workers").locator("tbody th")
            expect(heads).to_have_text(["web", "trainer", "ps"])
        refusals = [
            trouble
            for trouble in page.troubles
            if "ERR_" in trouble or "401" in trouble
        ]
        assert page.troubles == refusals
        page.troubles.clear()


def test_late_server_is_reported(calm: ShownGroup, open_page: Open) -> None:
    with served_from_outside(calm) as (server, url):
        page = open_page(url)
        page.open("overview")
        server.send_signal(signal.SIGSTOP)
        try:
            expect(page.page.locator("#lost")).to_contain_text("The looks are late.")
            expect(page.page.locator("body")).to_have_class("stale")
        finally:
            server.send_signal(signal.SIGCONT)
        expect(page.page.locator("#live")).to_have_text(re.compile(r"Live, \d"))
        expect(page.page.locator("#lost")).to_be_hidden()
        expect(page.page.get_by_role("status")).to_have_text("Connected again.")


# --- a hang --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hanging(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ShownGroup]:
    """A group that waits in a cycle."""
    with running("hanging", tmp_path_factory.mktemp("hanging")) as group:
        yield group


def test_hang_is_stated_and_drawn(hanging: ShownGroup, open_page: Open) -> None:
    page = open_page(hanging)
    page.open("hangs")
    page.wait_for("look.cycle.length > 0")
    look = page.stop()
    sentence = page.page.locator(".sentences li").first
    expect(sentence).to_contain_text(
        "which waits for web rows, which waits for ps apply"
    )
    expect(sentence).to_contain_text("a cycle")
    boxes = page.page.locator(".nodes > button")
    drawn = page.page.locator(".nodes > button[data-role=cycle]")
    expect(drawn).to_have_count(len(look["cycle"]))
    expect(page.page.locator(".edge.cycle")).to_have_count(len(look["cycle"]))
    for words in drawn.all_inner_texts():
        assert "in the cycle" in words
    places = [box.bounding_box() for box in boxes.all()]
    for at, first in enumerate(places):
        assert first is not None
        for second in places[at + 1 :]:
            assert second is not None
            assert (
                first["x"] + first["width"] <= second["x"]
                or second["x"] + second["width"] <= first["x"]
                or first["y"] + first["height"] <= second["y"]
                or second["y"] + second["height"] <= first["y"]
            )


def test_hang_is_stated_as_by_the_command(hanging: ShownGroup, open_page: Open) -> None:
    page = open_page(hanging)
    page.open("hangs")
    page.page.get_by_role("checkbox", name="Find out what nothing can end").check()
    page.wait_for("look.is_thorough && look.cycle.length > 0")
    look = page.stop()
    sentence = page.page.locator(".sentences li").first.inner_text()
    command = [sys.executable, "-m", "asyncrpc", "why", "--after", "1", hanging.address]
    completed = run_to_end(command, environ={"ASYNCRPC_SECRET": SECRET})
    said = completed.stdout.splitlines()[0]
    assert timeless(sentence) == timeless(said)
    assert sentence.endswith("a cycle, which nothing can end")
    assert look["sentences"][0].replace("`", "") == sentence


def timeless(sentence: str) -> str:
    return re.sub(r"\d[\d.]* (s|min|h)\b", "...", sentence.replace("`", ""))


def test_hang_is_walked_by_keys(hanging: ShownGroup, open_page: Open) -> None:
    page = open_page(hanging)
    page.open("hangs")
    page.wait_for("look.cycle.length > 0")
    look = page.stop()
    names = {node["id"]: node for node in look["nodes"]}
    follows = {edge["from"]: edge["to"] for edge in reversed(look["edges"])}
    expect(page.page.locator(".nodes [tabindex='0']")).to_have_count(1)
    at = look["cycle"][0]
    page.page.locator(f".nodes [data-id='{at}']").focus()
    for _ in look["cycle"]:
        at = follows[at]
        page.page.keyboard.press("ArrowDown")
        expect(page.page.locator(f".nodes [data-id='{at}']")).to_be_focused()
    assert at == look["cycle"][0], "once around"
    page.page.keyboard.press("Enter")
    panel = page.page.locator(".node-told")
    expect(panel).to_be_visible()
    expect(panel.locator("pre")).to_have_text("\n".join(names[at]["detail"]))
    button = page.page.locator(f".nodes [data-id='{at}']")
    expect(button).to_have_attribute("aria-pressed", "true")
    expect(button).to_have_accessible_name(re.compile("in the cycle"))


def test_hang_is_shown_as_a_table(hanging: ShownGroup, open_page: Open) -> None:
    page = open_page(hanging)
    page.open("hangs")
    page.wait_for("look.cycle.length > 0")
    look = page.stop()
    page.page.get_by_text("The same as a table").click()
    rows = page.rows("The waits")
    assert len(rows) == len(look["edges"])
    assert any(row["Who waits"].startswith("ps task apply") for row in rows)
    assert any("Lock table" in row["How"] for row in rows)


def test_drawing_is_made_once(hanging: ShownGroup, open_page: Open) -> None:
    """A selected box stays selected as looks come."""
    page = open_page(hanging)
    page.open("hangs")
    page.wait_for("look.cycle.length > 0")
    box = page.page.locator(".nodes > button").first
    box.click()
    page.page.evaluate("document.querySelector('.nodes > button').isTheSame = true")
    seen = page.page.evaluate("looks.length")
    page.wait_for(f"looks.length > {seen + 2}")
    assert page.page.evaluate("document.querySelector('.nodes > button').isTheSame")
    expect(box).to_be_focused()
    expect(page.page.locator(".node-told")).to_be_visible()
