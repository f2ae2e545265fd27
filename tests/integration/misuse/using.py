"""How one public function is used, rightly but for one argument."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import asyncrpc
from asyncrpc.testing import acting_as
from tests.integration.misuse.wrong import WRONG, World

# Only what never ends reaches it.
HANGS_AFTER_S: Final = 60.0

Arguments = Mapping[str, Callable[[World], Any]]
Call = Callable[[], Any]
ANYTHING: Final = frozenset(WRONG)


@dataclass(frozen=True)
class Use:
    """A public function, and what it is right to give it.

    Attributes:
        make: returns what is called: a function, a class, a bound method.
        right: arguments to begin with, by parameter; the others are left out.
        fits: the kinds of `WRONG` that are right for a parameter, or may be.
        says: what an error says of a parameter, as a regular expression, where that is
            not its name.
        refusals: classes of errors that are expected.
        rightly: uses it rightly, where that takes more than `right`.
        is_found_there: whether some mistakes can only be found by a peer, or what is
            right is made there.
        ready: makes what `make` and `right` need, where that has to be awaited.
        needs_worker: whether it is of no use without a worker that runs.
        finish: what is done with the result; by default it is awaited, iterated over or
            entered, whatever it is made for.
    """

    make: Callable[[World], Callable[..., Any]]
    right: Arguments = field(default_factory=dict)
    fits: Mapping[str, Collection[str]] = field(default_factory=dict)
    says: Mapping[str, str] = field(default_factory=dict)
    refusals: tuple[type[BaseException], ...] = (
        asyncrpc.UsageError,
        asyncrpc.errors.EncodeError,
    )
    rightly: Callable[[World], Awaitable[Any]] | None = None
    is_found_there: bool = False
    ready: Callable[[World], Awaitable[Any]] | None = None
    needs_worker: bool = True
    finish: Callable[[Any], Awaitable[Any]] | None = None

    async def made_ready(self, world: World) -> Call:
        """Return what uses it, as `prepared`, when all is there that it needs."""
        if self.ready is not None:
            await self.ready(world)
        return self.prepared(world)

    def prepared(self, world: World, parameter: str = "", kind: str = "") -> Call:
        """Return what uses it: with one argument of a kind of `WRONG`, or none."""
        arguments = {name: make(world) for name, make in self.right.items()}
        if parameter:
            arguments[parameter] = WRONG[kind](world)
        return _with_arguments(self.make(world), arguments, is_wrong=parameter)

    def right_call(self, world: World) -> Call:
        """Return what uses it rightly, so that it comes to an end."""
        if self.rightly is not None:
            return functools.partial(self.rightly, world)
        return self.prepared(world)

    async def finished(self, result: Any) -> Any:
        """Do with a result what it is made for."""
        return await (self.finish or finished)(result)

    async def outcome(
        self, world: World, parameter: str = "", kind: str = ""
    ) -> Outcome:
        """Use it as the worker `a`, and return what came of it."""

        async def attempt() -> Any:
            if self.ready is not None:
                await self.ready(world)
            if not parameter:
                return await self.finished(self.right_call(world)())
            return await self.finished(self.prepared(world, parameter, kind)())

        with acting_as(world.a):
            return await outcome_of(attempt)


class HungError(Exception):
    """An attempt did not end."""


def _with_arguments(
    function: Callable[..., Any], arguments: dict[str, Any], *, is_wrong: str
) -> Callable[[], Any]:
    """Return a call of a function with arguments by the names of its parameters."""
    positional: list[Any] = []
    named: dict[str, Any] = {}
    is_left_out = False
    for name, parameter in inspect.signature(function).parameters.items():
        if name not in arguments:
            is_left_out = True
            continue
        value = arguments[name]
        if parameter.kind is parameter.VAR_POSITIONAL:
            positional.extend([value] if name == is_wrong else value)
        elif parameter.kind is parameter.VAR_KEYWORD:
            named |= {"wrong": value} if name == is_wrong else value
        elif parameter.kind is parameter.KEYWORD_ONLY or is_left_out:
            named[name] = value
        else:
            positional.append(value)
    return functools.partial(function, *positional, **named)


async def finished(result: Any) -> Any:
    """Do with a result what it is made for, and return what comes of that."""
    if isinstance(result, asyncrpc.RRef):
        try:
            return await result.to_here()
        finally:
            result.release()
    if inspect.isawaitable(result):
        return await result
    if isinstance(result, AsyncIterator):
        return [item async for item in result]
    if isinstance(result, contextlib.AbstractAsyncContextManager):
        async with result as entered:
            return entered
    return result


async def nothing(result: Any) -> Any:
    """Do nothing with a result."""
    return result


@dataclass(frozen=True)
class Outcome:
    """What came of an attempt: an error, or none.

    Not the error itself: it would keep what was used.
    """

    kind: type[BaseException] | None = None
    text: str = ""

    @property
    def words(self) -> str:
        """The error without what differs from one attempt to the next."""
        if self.kind is None:
            return "no error"
        varies = r"(?<=RRef )[-.0-9a-f]+|0x[0-9a-f]+|\d+"
        return re.sub(varies, "#", f"{self.kind.__name__}: {self.text}")

    def problem(self, use: Use, parameter: str) -> str:
        """Return what is wrong with this outcome, empty if it is as it should be."""
        if self.kind is None:
            return "it was accepted"
        if not issubclass(self.kind, use.refusals):
            return f"it raised {self.words[:300]}"
        expected = use.says.get(parameter, rf"\b{re.escape(parameter)}\b")
        if not re.search(expected, self.text):
            return f"the error does not name it: {self.words[:300]}"
        return ""


NOTHING_RAISED: Final = Outcome()


async def outcome_of(attempt: Callable[[], Awaitable[Any]]) -> Outcome:
    """Make one attempt, and return what came of it."""
    try:
        async with asyncio.timeout(HANGS_AFTER_S) as limit:
            await attempt()
    except asyncio.CancelledError:
        raise
    except TimeoutError as error:
        if limit.expired():
            return Outcome(HungError, f"it did not end in {HANGS_AFTER_S:g} s")
        return Outcome(type(error), str(error))
    except BaseException as error:  # noqa: BLE001  (it is looked at)
        return Outcome(type(error), str(error))
    return NOTHING_RAISED
