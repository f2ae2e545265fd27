"""How one public function is used, rightly but for one argument."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import asyncrpc
from asyncrpc import AsyncRpcError
from asyncrpc.testing import acting_as
from tests.integration.misuse.wrong import WRONG, World

# Only what never ends reaches it.
HANGS_AFTER_S: Final = 60.0

Arguments = Mapping[str, Callable[[World], Any]]
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
        finish: what is done with the result; by default it is awaited, iterated over or
            entered, whatever it is made for.
    """

    make: Callable[[World], Callable[..., Any]]
    right: Arguments = field(default_factory=dict)
    fits: Mapping[str, Collection[str]] = field(default_factory=dict)
    says: Mapping[str, str] = field(default_factory=dict)
    refusals: tuple[type[BaseException], ...] = (
        asyncrpc.UsageError,
        asyncrpc.EncodeError,
    )
    rightly: Callable[[World], Awaitable[Any]] | None = None
    finish: Callable[[Any], Awaitable[Any]] | None = None

    async def attempt(self, world: World, parameter: str = "", kind: str = "") -> Any:
        """Use it once, with one argument of a kind of `WRONG`, or rightly."""
        given = {name: make(world) for name, make in self.right.items()}
        value = None
        if parameter:
            value = given[parameter] = WRONG[kind](world)
        try:
            with acting_as(world.a):
                async with asyncio.timeout(HANGS_AFTER_S):
                    if self.rightly is not None and not parameter:
                        return await self.rightly(world)
                    function = self.make(world)
                    result = _call(function, given, is_wrong=parameter)
                    return await (self.finish or finished)(result)
        finally:
            if inspect.iscoroutine(value):
                value.close()


def _call(function: Callable[..., Any], given: dict[str, Any], *, is_wrong: str) -> Any:
    """Call a function with arguments by the names of its parameters."""
    positional: list[Any] = []
    named: dict[str, Any] = {}
    is_left_out = False
    for name, parameter in inspect.signature(function).parameters.items():
        if name not in given:
            is_left_out = True
            continue
        value = given[name]
        if parameter.kind is parameter.VAR_POSITIONAL:
            positional.extend([value] if name == is_wrong else value)
        elif parameter.kind is parameter.VAR_KEYWORD:
            named |= {"wrong": value} if name == is_wrong else value
        elif parameter.kind is parameter.KEYWORD_ONLY or is_left_out:
            named[name] = value
        else:
            positional.append(value)
    return function(*positional, **named)


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
    """What came of an attempt: an error, or none."""

    error: BaseException | None = None

    @property
    def words(self) -> str:
        """The error without what differs from one attempt to the next."""
        if self.error is None:
            return "no error"
        text = f"{type(self.error).__name__}: {self.error}"
        return re.sub(r"0x[0-9a-f]+|\d+", "#", text)

    def problem(self, use: Use, parameter: str) -> str:
        """Return what is wrong with this outcome, empty if it is as it should be."""
        if self.error is None:
            return "it was accepted"
        if isinstance(self.error, TimeoutError) and not isinstance(
            self.error, AsyncRpcError
        ):
            return f"it did not end in {HANGS_AFTER_S:g} s"
        if not isinstance(self.error, use.refusals):
            return f"it raised {self.words[:300]}"
        expected = use.says.get(parameter, rf"\b{re.escape(parameter)}\b")
        if not re.search(expected, str(self.error)):
            return f"the error does not name it: {self.words[:300]}"
        return ""


async def outcome_of(
    use: Use, world: World, parameter: str = "", kind: str = ""
) -> Outcome:
    """Make one attempt, and return what came of it."""
    try:
        await use.attempt(world, parameter, kind)
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # noqa: BLE001  (it is looked at)
        return Outcome(error.with_traceback(None))
    return Outcome()
