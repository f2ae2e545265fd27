"""A page of the dashboard in headless Chromium, and what went wrong in it."""

from __future__ import annotations

import re
from typing import Any, Final
from urllib.parse import quote, urlsplit

from playwright.sync_api import (
    BrowserContext,
    ConsoleMessage,
    Error,
    Locator,
    Page,
    Request,
    expect,
)

from tests.browser.programs import TOKEN

# A page takes a look every half second: only a hang lasts so long, or another text.
HANGS_MS: Final = 60_000.0
VIEWS: Final = (
    *("overview", "worker", "worker/ps", "calls", "references", "training"),
    *("collectives", "hangs"),
)
# Notes what the server tells, and what the page is not allowed to do.
_NOTE: Final = """
globalThis.looks = [];
globalThis.violations = [];
const Source = EventSource;
globalThis.EventSource = class extends Source {
  constructor(...args) {
    super(...args);
    this.addEventListener("look", (event) => {
      looks.push(JSON.parse(event.data));
      dispatchEvent(new Event("look"));
    });
  }
};
addEventListener("securitypolicyviolation", (event) =>
  violations.push(`${event.violatedDirective}: ${event.blockedURI}`),
);
"""


class DashboardPage:
    """A page that shows a dashboard."""

    def __init__(self, context: BrowserContext, url: str) -> None:
        self.url = url  # of the dashboard
        self.troubles: list[str] = []  # errors of the page and its console
        self.strangers: list[str] = []  # requests that went elsewhere
        context.add_init_script(_NOTE)
        self.page: Page = context.new_page()  # of playwright
        self.page.set_default_timeout(HANGS_MS)
        self.page.on("console", self._on_console)
        self.page.on("pageerror", self._on_error)
        self.page.on("request", self._on_request)
        self.page.on("dialog", lambda dialog: self.troubles.append(dialog.message))

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.troubles.append(message.text)

    def _on_error(self, error: Error) -> None:
        self.troubles.append(str(error))

    def _on_request(self, request: Request) -> None:
        if urlsplit(request.url)[:2] != urlsplit(self.url)[:2]:
            self.strangers.append(request.url)

    def check(self) -> None:
        """Fail if the page met an error, or asked elsewhere, or broke its policy."""
        assert not self.troubles
        assert not self.strangers
        assert self.page.evaluate("violations") == []

    # --- views -----------------------------------------------------------------------

    def open(self, view: str, query: str = "") -> None:
        """Go to a view, such as "worker/ps", and wait for its first look."""
        path = "/".join(quote(part, safe="") for part in view.split("/", 1))
        self.page.goto(f"{self.url}#/{path}{query}")
        self.wait_for_look()

    def wait_for_look(self) -> None:
        """Wait until the page shows a look of what it was asked for."""
        expect(self.page.locator("main[aria-busy=false]")).to_be_attached()

    def wait_for(self, condition: str) -> None:
        """Wait for a look, `look`, of which an expression in JavaScript is true."""
        script = """async () => {
          const holds = (look) => look != null && (CONDITION);
          while (!holds(looks.at(-1)))
            await new Promise((go) => addEventListener("look", go, { once: true }));
        }"""
        self.page.evaluate(script.replace("CONDITION", condition))

    def alert(self) -> str:
        """Wait until the page alerts its reader, in whatever words; return these."""
        alert = self.page.get_by_role("alert").filter(has_text=re.compile(r"\S"))
        alert.wait_for()
        words: str = alert.inner_text()
        return words

    def stop(self) -> dict[str, Any]:
        """Let the page take no more looks; return the one that it shows."""
        self.page.get_by_role("button", name="Pause").click()
        expect(self.page.locator("#live")).to_have_text("Paused")
        look: dict[str, Any] = self.page.evaluate("looks.at(-1)")
        return look

    def written(self, how: str, value: Any) -> str:
        """Return a value as the page writes it, by a function of its format.js."""
        script = """async ([how, value]) =>
          (await import(new URL("static/format.js", document.baseURI)))[how](value)"""
        text: str = self.page.evaluate(script, [how, value])
        return text

    # --- tables ----------------------------------------------------------------------

    def table(self, name: str) -> Locator:
        return self.page.get_by_role("table", name=name)

    def rows(self, name: str) -> list[dict[str, str]]:
        """Return the rows of a table, as texts by the names of its columns."""
        table = self.table(name)
        heads = [
            text.strip()
            for text in table.locator("thead th").evaluate_all(
                "heads => heads.map((head) => head.querySelector('.unseen')"
                "?.textContent ?? head.textContent)"
            )
        ]
        rows = table.locator("tbody tr").evaluate_all(
            "rows => rows.map((row) => [...row.cells].map((cell) => cell.innerText))"
        )
        return [dict(zip(heads, row, strict=True)) for row in rows]


def sign_in(context: BrowserContext, url: str) -> None:
    """Begin a session as a program does; the form has tests of its own."""
    answer = context.request.post(f"{url}login", data={"token": TOKEN})
    assert answer.ok, answer.text()
