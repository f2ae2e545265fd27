"""Tables whose columns fit the line."""

from __future__ import annotations

from asyncrpc.tools.cli.table import line_of, lines_of, wrapped

ROWS = [("name", "what"), ("ps", "waits for a lock"), ("trainer0", "runs")]


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    assert lines_of(ROWS, width=80) == [
        "name      what",
        "ps        waits for a lock",
        "trainer0  runs",
    ]


def test_widest_column_is_cut_to_the_line() -> None:
    lines = lines_of(ROWS, width=20)
    assert lines[1] == "ps        waits for…"
    assert max(map(len, lines)) == 20


def test_narrow_line_keeps_a_part_of_each_column() -> None:
    assert lines_of(ROWS, width=1)[2].startswith("trainer0")


def test_empty_table_has_no_lines() -> None:
    assert lines_of([], width=80) == []


def test_control_characters_are_shown_as_text() -> None:
    text = "\x1b[2Ja\nb\u202e\x9b"
    shown = r"\x1b[2Ja\nb\u202e\x9b"
    assert lines_of([[text]], width=80) == [shown]
    assert line_of(text) == wrapped(text) == shown
    assert line_of("é…") == "é…"
