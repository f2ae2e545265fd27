"""What a notebook shows: escaped, bounded, in the page's own colours."""

from __future__ import annotations

from html.parser import HTMLParser

from asyncrpc import LocalRendezvous, Options, Worker
from asyncrpc.core.html import ROWS_MAX, TEXT_MAX, State, panel
from asyncrpc.errors import UsageError, WorkerStartError

EVIL = '<script>alert("&")</script>'


class Reader(HTMLParser):
    """Reads text and tags; every tag must be closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.texts: list[str] = []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_every_text_is_escaped() -> None:
    rows = [(EVIL, EVIL, State(EVIL, "bad", EVIL))]
    for columns in ((), (EVIL, EVIL, EVIL)):
        read = Reader(panel(EVIL, EVIL, columns=columns, rows=rows, note=EVIL))
        assert "script" not in read.tags
        assert "".join(read.texts).count(EVIL) == 7 + len(columns)


def test_panel_has_no_colours_of_a_page() -> None:
    html = panel("a", "b", columns=("c",), rows=[(1,)], note="d")
    assert "background:transparent" in html
    assert html.count("background") == html.count("background:transparent")
    assert "color:" not in html


def test_long_tables_and_texts_are_cut() -> None:
    rows = [(n, "x" * (2 * TEXT_MAX)) for n in range(ROWS_MAX + 2_000)]
    html = panel("a", columns=("n", "text"), rows=rows)
    assert html.count("<tr") == 1 + ROWS_MAX
    assert "and 2,000 more" in html
    assert "x" * (TEXT_MAX + 1) not in html


def test_absent_cells_and_numbers_are_shown() -> None:
    read = Reader(panel("a", rows=[("n", 1234, 0.25, None)]))
    assert read.texts[1:] == ["n", "1,234", "0.2", "\N{EN DASH}"]


def test_options_show_what_differs_and_no_secret() -> None:
    assert "all have their defaults" in Options()._repr_html_()
    read = Reader(Options(secret="of a few words", threads=3)._repr_html_())
    assert "of a few words" not in "".join(read.texts)
    assert read.texts[1:] == [
        *("option", "value", "default", "secret", "(not shown)", "None"),
        *("threads", "3", "16", "all others have their defaults"),
    ]


def test_worker_that_has_not_started_shows_its_state() -> None:
    read = Reader(Worker("a", rendezvous=LocalRendezvous(1))._repr_html_())
    assert read.texts[0] == "Worker 'a'"
    assert "new" in "".join(read.texts)


def test_error_shows_its_text_and_the_remote_traceback() -> None:
    assert Reader(UsageError(EVIL)._repr_html_()).texts == ["UsageError", f": {EVIL}"]
    error = WorkerStartError("no", worker="w0", remote_traceback=EVIL)
    assert Reader(error._repr_html_()).texts[2:] == ["Traceback of worker w0", EVIL]
