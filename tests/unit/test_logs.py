"""A peer cannot fill the log, nor write lines of its own into it."""

from __future__ import annotations

import ast
import logging

import pytest

from asyncrpc.core.logs import (
    FORGOTTEN_AFTER_S,
    LINE_CHARACTERS_MAX,
    LINES_AT_ONCE,
    PEERS_MAX,
    TRACEBACK_CHARACTERS_MAX,
    LogLimit,
    PeerLineFilter,
)
from tests.architecture.sources import PACKAGE, name_of, parse, python_files

# torch's own names of these loggers: programs look for them.
LOGGERS_OF_TORCH = "asyncrpc/compat/rpc/"


class Log:
    """A logger with the filter, in a time of its own."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.now_s = 0.0
        self._logger = logging.Logger("log")  # noqa: LOG001  (of this test alone)
        self._logger.addFilter(PeerLineFilter(lambda: self.now_s))
        handler = logging.Handler()
        handler.emit = lambda record: self.lines.append(handler.format(record))  # type: ignore[method-assign]
        self._logger.addHandler(handler)

    def say(self, *args: object, error: Exception | None = None) -> None:
        self._logger.warning(*args, exc_info=error)

    def say_elsewhere(self, *args: object) -> None:
        self._logger.warning(*args)


def test_burst_is_logged_then_one_line_a_second_with_a_count() -> None:
    log = Log()
    for _ in range(10_000):
        log.say("from %r: %s", "a", OSError("no"))
    assert len(log.lines) == LINES_AT_ONCE
    for second in (1, 2):
        log.now_s += 1
        for _ in range(10):
            log.say("from %r: %s", "a", OSError("no"))
        assert len(log.lines) == LINES_AT_ONCE + second
    left_out = 10_000 - LINES_AT_ONCE
    assert log.lines[-2].endswith(f"no ({left_out} more before it)")
    assert log.lines[-1] == "from 'a': no (9 more before it)"


def test_peers_and_kinds_have_separate_limits() -> None:
    log = Log()
    for _ in range(1000):
        log.say("from %r", "a")
    log.say("from %r", "b")
    log.say_elsewhere("from %r", "a")
    assert log.lines[LINES_AT_ONCE:] == ["from 'b'", "from 'a'"]


def test_peer_with_many_names_gets_no_more_lines() -> None:
    log = Log()
    for number in range(10_000):
        log.say("from %r", f"name {number}")
    assert len(log.lines) == PEERS_MAX + LINES_AT_ONCE


def test_line_limit_ignores_the_arguments() -> None:
    log = Log()
    for number in range(10_000):
        log.say("from %r: %s: %d: %s", "a", ValueError(number), number, str(number))
    assert len(log.lines) == LINES_AT_ONCE


def test_silence_allows_a_new_burst() -> None:
    log = Log()
    for _ in range(2):
        for _ in range(1000):
            log.say("no")
        log.now_s += FORGOTTEN_AFTER_S + 1
    assert len(log.lines) == 2 * LINES_AT_ONCE
    for number in range(PEERS_MAX):
        log.say("from %r", f"gone {number}")
    log.now_s += FORGOTTEN_AFTER_S + 1
    for _ in range(1000):
        log.say("from %r", "a")
    assert len(log.lines) == 3 * LINES_AT_ONCE + PEERS_MAX


def test_refusals_are_logged_once_a_second() -> None:
    limit = LogLimit()
    assert [limit.left_out("a", now_s) for now_s in (0.0, 0.5, 1.0, 1.5, 2.0)] == [
        "",
        None,
        " (1 more before it)",
        None,
        " (1 more before it)",
    ]


@pytest.mark.parametrize("text", ["a\x1b[2J", "a\rb", "a\x9bb", "a\u202eb", "a\u2028b"])
def test_terminal_commands_are_escaped(text: str) -> None:
    log = Log()
    log.say("from %s", text)
    assert log.lines == [f"from {ascii(text)[1:-1]}"]


def test_forged_log_lines_are_indented() -> None:
    log = Log()
    forged = "no\nWARNING a died\n\nERROR b died"
    log.say("from %s", forged)
    log.say("from a", error=ValueError(forged))
    for line in log.lines:
        assert not [text for text in line.split("\n")[1:] if not text.startswith("  ")][
            1:
        ]
    assert log.lines[0] == "from no\n  WARNING a died\n  \n  ERROR b died"
    assert "\n  ERROR b died" in log.lines[1]


def test_line_and_its_traceback_are_short() -> None:
    log = Log()
    log.say("from %s", "x" * 100_000, error=ValueError("y" * 100_000))
    message, _, traceback = log.lines[0].partition("\n")
    assert len(message) < LINE_CHARACTERS_MAX + 100
    assert len(traceback) < TRACEBACK_CHARACTERS_MAX + 100


def test_ordinary_lines_keep_their_arguments() -> None:
    line_filter = PeerLineFilter()
    record = logging.LogRecord("", logging.INFO, "f.py", 1, "%s of %d", ("a", 2), None)
    assert line_filter.filter(record)
    assert (record.msg, record.args) == ("%s of %d", ("a", 2))


def test_unprintable_argument_is_left_to_the_handler() -> None:
    class Unreadable:
        def __str__(self) -> str:
            raise ValueError

    record = logging.LogRecord("", logging.INFO, "f.py", 1, "%s", (Unreadable(),), None)
    assert PeerLineFilter().filter(record)


def test_every_logger_of_the_package_has_the_filter() -> None:
    loggers = {
        name_of(path): ast.unparse(call)
        for path in python_files(PACKAGE)
        for call in ast.walk(parse(path))
        if isinstance(call, ast.Call)
        and ast.unparse(call.func).endswith(("getLogger", "LoggerAdapter"))
        and ast.unparse(call) != "logging.getLogger('asyncrpc')"
    }
    others = [name for name in loggers if not name.startswith(LOGGERS_OF_TORCH)]
    assert others == [], "log with logging.getLogger('asyncrpc'): its lines are bounded"
    assert any(
        isinstance(log_filter, PeerLineFilter)
        for log_filter in logging.getLogger("asyncrpc").filters
    )
