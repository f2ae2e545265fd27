"""Marks: when a call passed which place, in both processes, on one clock.

`time.perf_counter_ns` is the same clock in every process of a host.  A mark is one
integer, time and place together: a list of integers gives the garbage collector nothing
to walk through.

A probe wraps a method of a class before any object of it exists, because bound methods
are kept in many places (the event loop keeps those of a protocol).  A method that is no
longer there is skipped, and its stage is part of the next one.
"""

from __future__ import annotations

import enum
import importlib
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple, Self, TypeVar

import torch

from tests.bench.harness import p50_p99_us

PLACE_BITS: Final = 6
CALIBRATIONS: Final = 20_000


class Place(enum.IntEnum):
    """Where a call passes, in order; the text says what led up to it."""

    text: str

    def __new__(cls, number: int, text: str) -> Self:
        """Make a member that is a number and has a text."""
        place = int.__new__(cls, number)
        place._value_ = number
        place.text = text
        return place

    BEGIN = 0, ""
    ENCODE = 1, "start: find function, link, deadline"
    ENCODED = 2, "encode the arguments"
    WRITE = 3, "head and frame"
    WRITTEN = 4, "write: system call"
    READ = 5, "-> wire, wake-up, read"
    MESSAGE = 6, "parse the frame"
    DECODE = 7, "head, deadline, context"
    DECODED = 8, "decode the arguments"
    RUN = 9, "dispatch: to a task or a thread"
    RAN = 10, "run the function"
    REPLY = 11, "back to the loop"
    REPLY_ENCODED = 12, "encode the result"
    REPLY_WRITE = 13, "head and frame of the reply"
    REPLY_WRITTEN = 14, "reply write: system call"
    ANSWER = 15, "<- wire, wake-up, read"
    ANSWER_MESSAGE = 16, "parse the reply"
    ANSWER_DECODE = 17, "find the call"
    ANSWER_DECODED = 18, "decode the result"
    DONE = 19, "complete the future"
    END = 20, "resume the caller's task"


P = TypeVar("P", bound=enum.IntEnum)  # places


class Probe(NamedTuple):
    """A method, and the places that its beginning and its end are."""

    module: str
    owner: str
    method: str
    begin: Place | None
    end: Place | None


_CODEC: Final = ("asyncrpc.core.calls.message_codec", "MessageCodec")
_SOCKET: Final = ("asyncrpc.core.transport.sockets", "SocketTransport")
_CONNECTION: Final = ("asyncrpc.core.links.connection", "Connection")
_ANSWERS: Final = ("asyncrpc.core.calls.outbound", "AnswerReceiver")
_REQUESTS: Final = ("asyncrpc.core.calls.requests", "RequestDispatcher")
_FUTURE: Final = ("asyncrpc.core.calls.futures", "CallFuture")

CALLER_PROBES: Final = (
    Probe(*_CODEC, "encode", Place.ENCODE, Place.ENCODED),
    Probe(*_SOCKET, "send", Place.WRITE, Place.WRITTEN),
    Probe(*_CONNECTION, "buffer_updated", Place.ANSWER, None),
    Probe(*_ANSWERS, "on_response", Place.ANSWER_MESSAGE, None),
    Probe(*_CODEC, "decode", Place.ANSWER_DECODE, Place.ANSWER_DECODED),
    Probe(*_FUTURE, "succeed", None, Place.DONE),
)
CALLEE_PROBES: Final = (
    Probe(*_CONNECTION, "buffer_updated", Place.READ, None),
    Probe(*_REQUESTS, "on_request", Place.MESSAGE, None),
    Probe(*_CODEC, "decode", Place.DECODE, Place.DECODED),
    Probe(*_CODEC, "encode", Place.REPLY, Place.REPLY_ENCODED),
    Probe(*_SOCKET, "send", Place.REPLY_WRITE, Place.REPLY_WRITTEN),
)

marks: list[int] = []


def mark(place: int) -> None:
    """Take down that something is at `place` now."""
    marks.append(time.perf_counter_ns() << PLACE_BITS | place)


def attach(probe: Probe) -> bool:
    """Wrap the method that a probe names; say whether there is one."""
    owner = getattr(importlib.import_module(probe.module), probe.owner, None)
    method = getattr(owner, probe.method, None)
    if owner is None or method is None:
        return False
    setattr(owner, probe.method, traced(method, probe.begin, probe.end))
    return True


def traced(
    function: Callable[..., Any], begin: int | None, end: int | None
) -> Callable[..., Any]:
    """Return `function` with marks at its beginning, its end or both."""
    now, append = time.perf_counter_ns, marks.append

    def both(*args: Any, **kwargs: Any) -> Any:
        append(now() << PLACE_BITS | begin)  # type: ignore[operator]
        result = function(*args, **kwargs)
        append(now() << PLACE_BITS | end)  # type: ignore[operator]
        return result

    def first(*args: Any, **kwargs: Any) -> Any:
        append(now() << PLACE_BITS | begin)  # type: ignore[operator]
        return function(*args, **kwargs)

    def last(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        append(now() << PLACE_BITS | end)  # type: ignore[operator]
        return result

    if end is None:
        return first
    return last if begin is None else both


def mark_cost_ns() -> float:
    """Measure what one mark costs: half of what two add to a call of nothing."""

    def nothing(*_args: object) -> None: ...

    def median_ns(function: Callable[..., Any]) -> float:
        times_ns = []
        for _ in range(CALIBRATIONS // 100):
            start_ns = time.perf_counter_ns()
            for _ in range(100):
                function(None)
            times_ns.append((time.perf_counter_ns() - start_ns) / 100)
        return statistics.median(times_ns)

    cost_ns = (median_ns(traced(nothing, 0, 1)) - median_ns(nothing)) / 2
    marks.clear()
    return max(0.0, cost_ns)


# --- what the callee runs, marks included --------------------------------------------


def trace_nothing() -> None:
    mark(Place.RUN)
    mark(Place.RAN)


async def trace_nothing_async() -> None:
    mark(Place.RUN)
    mark(Place.RAN)


def trace_add_one(tensor: torch.Tensor) -> torch.Tensor:
    mark(Place.RUN)
    result = tensor + 1
    mark(Place.RAN)
    return result


def taken_marks() -> list[int]:
    """Return this process's marks, and forget them."""
    taken = list(marks)
    marks.clear()
    return taken


async def take_marks() -> list[int]:
    """As `taken_marks`, on the loop."""
    return taken_marks()


# --- from marks to stages ------------------------------------------------------------


def cut(marks_of_both: Iterable[int], places: type[P]) -> list[dict[P, int]]:
    """Cut the marks of actions that came one after the other into actions.

    Only those count that passed the same places as most did: a call that met a ping,
    say, is left out.

    Args:
        places: what a mark's number means; the first begins an action, the last ends
            it.
    """
    by_number = {int(place): place for place in places}
    (first, *_, last), mask = by_number.values(), (1 << PLACE_BITS) - 1
    actions: list[list[tuple[P, int]]] = []
    for packed_mark in sorted(marks_of_both):
        place = by_number[packed_mark & mask]
        if place is first:
            actions.append([])
        if actions and (not actions[-1] or actions[-1][-1][0] is not last):
            actions[-1].append((place, packed_mark >> PLACE_BITS))
    # A write returns at one side while the other side wakes: these two may swap.
    orders = [tuple(sorted(place for place, _ in action)) for action in actions]
    if not orders:
        return []
    usual = Counter(orders).most_common(1)[0][0]
    return [
        dict(action)
        for action, order in zip(actions, orders, strict=True)
        if order == usual
    ]


def passages(marks_of_both: Iterable[int]) -> list[dict[Place, int]]:
    """Cut marks into calls; a write ends no later than what it sent is read."""
    return [_in_order(call) for call in cut(marks_of_both, Place)]


def _in_order(call: dict[Place, int]) -> dict[Place, int]:
    """End a write no later than what it sent is read: on one core it returns late."""
    for written, read in (
        (Place.WRITTEN, Place.READ),
        (Place.REPLY_WRITTEN, Place.ANSWER),
    ):
        if written in call and read in call:
            call[written] = min(call[written], call[read])
    return call


def middle(pairs: Iterable[Sequence[float]]) -> list[float]:
    return [statistics.median(column) for column in zip(*pairs, strict=True)]


def stage_of(
    starts: Iterable[Mapping[P, Sequence[float]]], place: P
) -> list[float] | None:
    """Return the medians over starts of a stage's p50 and p99; None: there is none."""
    times_us = [start[place] for start in starts if place in start]
    pairs = [p50_p99_us([took_us / 1e6 for took_us in times]) for times in times_us]
    return middle(pairs) if pairs else None


def stages(actions: Sequence[Mapping[P, int]]) -> dict[P, list[float]]:
    """Return the microseconds that led up to each place, action by action."""
    if not actions:
        return {}
    order = sorted(actions[0])
    return {
        place: [(action[place] - action[before]) / 1000 for action in actions]
        for before, place in pairwise(order)
    }
