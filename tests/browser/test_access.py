"""Who may look signs in, and the secret stays in the page."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Request, expect

from tests.browser.conftest import ELSEWHERE, Open
from tests.browser.groups import ShownGroup, served_on_terminal
from tests.browser.pages import DashboardPage
from tests.browser.programs import SECRET, TOKEN


def sign_in(page: DashboardPage, word: str) -> None:
    page.page.get_by_label(re.compile("token|secret")).fill(word)
    page.page.get_by_role("button", name="Sign in").click()


@pytest.mark.parametrize("word", [SECRET, TOKEN, f"  {SECRET}\n"])
def test_page_sends_a_token_and_not_the_typed_secret(
    busy: ShownGroup, open_page: Open, word: str
) -> None:
    page = open_page(busy, is_signed_in=False)
    sent: list[str] = []

    def note(request: Request) -> None:
        sent.append(f"{request.url} {request.post_data} {request.headers}")

    page.page.on("request", note)
    page.page.goto(f"{busy.url}#/worker/ps?tasks.sort=name")
    sign_in(page, word)
    expect(page.page.locator("h1")).to_have_text("ps")
    expect(page.page.locator("#live")).to_have_text(re.compile(r"Live, \d"))
    assert any('{"token":' in text for text in sent)
    assert not any(word.strip() in text for text in sent)
    cookie = page.page.context.cookies()[0]
    assert cookie["httpOnly"]
    assert cookie["sameSite"] == "Strict"
    assert cookie["path"].rstrip("/") == "/some/prefix"


def test_wrong_secret_is_refused_and_the_right_one_accepted(
    busy: ShownGroup, open_page: Open
) -> None:
    page = open_page(busy, is_signed_in=False)
    page.page.goto(busy.url)
    field = page.page.get_by_label(re.compile("token|secret"))
    expect(field).to_be_focused()
    sign_in(page, "something else")
    assert page.alert().startswith("this is not the secret or the token")
    assert all("403" in trouble for trouble in page.troubles)
    page.troubles.clear()
    sign_in(page, SECRET)
    expect(page.page.locator("h1")).to_have_text("Overview")


def test_the_link_of_a_terminal_signs_in_one_browser_once(
    busy: ShownGroup, open_page: Open
) -> None:
    with served_on_terminal(busy) as link:
        page = open_page(link, is_signed_in=False)
        page.page.goto(link)
        expect(page.page.locator("h1")).to_have_text("Overview")
        assert "ticket" not in page.page.url
        assert "ticket" not in page.page.evaluate("document.documentElement.outerHTML")
        other = open_page(link, is_signed_in=False)
        other.page.goto(link)
        assert other.alert().startswith("this link has signed in a browser")
        assert all("403" in trouble for trouble in other.troubles)
        other.troubles.clear()
        sign_in(other, SECRET)  # which is as good as ever
        expect(other.page.locator("h1")).to_have_text("Overview")
        for tab in (page, other):  # they would miss the server
            tab.page.goto("about:blank")


def test_signing_out_ends_the_session(busy: ShownGroup, open_page: Open) -> None:
    page = open_page(busy)
    page.open("calls")
    page.page.get_by_role("button", name="Sign out").click()
    expect(page.page.locator("h1")).to_have_text("Sign in")
    expect(page.page.get_by_role("button", name="Sign out")).to_be_hidden()
    assert page.page.context.request.get(f"{busy.url}api/calls").status == 401
    page.page.go_back()  # shows nothing of before
    expect(page.page.locator("table")).to_have_count(0)


def test_page_without_cryptography_takes_the_token_alone(
    busy: ShownGroup, open_page: Open
) -> None:
    """By plain HTTP from another host a browser has no crypto.subtle."""
    url = busy.url.replace("127.0.0.1", ELSEWHERE)
    page = open_page(url, is_signed_in=False)
    page.page.goto(url)
    assert page.page.evaluate("globalThis.crypto.subtle === undefined")
    note = page.page.locator("#login-note")
    expect(note).to_contain_text("never the group's secret")
    expect(note).to_contain_text(re.compile(r"ssh -L 8080:localhost:\d+ "))
    expect(page.page.get_by_label("The dashboard's token")).to_be_visible()
    sign_in(page, TOKEN)
    expect(page.page.locator("h1")).to_have_text("Overview")
    # What the browser says of a header that counts for HTTPS alone.
    assert all("Cross-Origin-Opener-Policy" in trouble for trouble in page.troubles)
    page.troubles.clear()


def test_the_form_has_names_and_fits_a_phone(busy: ShownGroup, open_page: Open) -> None:
    page = open_page(busy, is_signed_in=False, viewport={"width": 360, "height": 740})
    page.page.goto(busy.url)
    field = page.page.get_by_label(re.compile("token|secret"))
    expect(field).to_have_attribute("type", "password")
    expect(field).to_have_accessible_description(re.compile("is not sent"))
    assert page.page.evaluate("document.documentElement.scrollWidth") <= 360
