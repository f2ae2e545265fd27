"""What fails on other workers, in every way that a test asks for."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

import asyncrpc

TEXT = "ünïcode € 😀 C:\\new\\table %s {x} \x00 end"


class TwoArgumentsError(Exception):
    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{code}: {reason}")
        self.code = code
        self.reason = reason


class KeywordOnlyError(Exception):
    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


class UnpicklableError(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class HostileError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def with_text() -> NoReturn:
    raise ValueError(TEXT)


async def with_text_async() -> NoReturn:
    raise ValueError(TEXT)


@asyncrpc.on_loop
def with_text_on_loop() -> NoReturn:
    raise ValueError(TEXT)


def two_arguments() -> NoReturn:
    raise TwoArgumentsError(7, "seven")


def keyword_only() -> NoReturn:
    raise KeywordOnlyError(code=7)


def unpicklable() -> NoReturn:
    raise UnpicklableError("it has a lock")


def hostile() -> NoReturn:
    raise HostileError


def made_on_the_spot() -> NoReturn:
    class LocalError(LookupError):
        pass

    raise LocalError("of a class that only this call knows")


def chained() -> NoReturn:
    try:
        raise KeyError("missing")  # noqa: TRY301  (it is to be caught)
    except KeyError as error:
        raise ValueError("outer") from error


def in_context() -> NoReturn:
    try:
        raise KeyError("missing")  # noqa: TRY301  (it is to be caught)
    except KeyError:
        raise ValueError("outer")  # noqa: B904  (what is tested)


def grouped() -> NoReturn:
    raise ExceptionGroup("both", [ValueError("one"), TwoArgumentsError(2, "two")])


def noted() -> NoReturn:
    error = ValueError("with a note")
    error.add_note("the note")
    raise error


def stop_iteration() -> NoReturn:
    raise StopIteration(3)


def exit_at_once() -> NoReturn:
    sys.exit(3)


async def exit_async() -> NoReturn:
    sys.exit(3)


@asyncrpc.on_loop
def exit_on_loop() -> NoReturn:
    sys.exit(3)


def interrupt() -> NoReturn:
    raise KeyboardInterrupt


async def cancel_itself() -> NoReturn:
    import asyncio  # noqa: PLC0415

    raise asyncio.CancelledError


async def relay(to: str, function: Callable[..., Any]) -> Any:
    return await asyncrpc.current_worker().peer(to).call(function)
