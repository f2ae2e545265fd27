"""The messages of autograd: their schema, and the fields of a pass's messages."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

import torch

from asyncrpc.autograd.engine import Keeping
from asyncrpc.autograd.functions import Received
from asyncrpc.errors import MalformedError
from asyncrpc.ids import ContextId, Incarnation, WorkerId
from asyncrpc.runtime.forms import (
    COUNT,
    ID,
    TENSOR,
    TEXT,
    Form,
    array,
    each,
    maybe,
    unfit,
    whole,
)

SERVICE: Final = "autograd"
PassId = tuple[int, int]  # the worker that began it, and its number there
Ids = tuple[ContextId, PassId]
_RETAIN, _CREATE, _FAST = 1, 2, 4

CONTEXT: Final[Form] = array(creator=ID, serial=ID)
META: Final[Form] = array(creator=ID, serial=ID, message=ID)
PASS: Final[Form] = array(creator=ID, serial=ID, root=ID, number=ID)
WAITS: Final[Form] = array(creator=ID, serial=ID, root=ID, number=ID, asked=each(ID))
REPORTS: Final[Form] = each(array(worker=ID, number=COUNT, done=whole(0, 2, "0 or 1")))
_LINES: Final[Form] = each(TEXT)
_PLAN: Final[Form] = array(
    creator=ID,
    serial=ID,
    root=ID,
    number=ID,
    name=TEXT,
    flags=whole(0, 8, "flags that add up to at most 7"),
    asked=each(ID),
    given=each(ID),
    history=maybe(each(ID)),
)
_GRADIENTS: Final[Form] = each(maybe(TENSOR))


class Advance(NamedTuple):
    """A request to take part in a pass.

    Attributes:
        gradients: of the tensors in `given`.
        ids: of the context and the pass.
        root: name of the worker that began it.
        keeping: what is kept of the graph.
        is_fast: whether every sent tensor is taken to take part.
        asked: pairs of message and position: tensors whose gradient comes later.
        given: pairs for tensors whose gradient is in this message.
        history: the message, then indices of gradients that have a history.
    """

    gradients: list[torch.Tensor | None]
    ids: Ids
    root: str
    keeping: Keeping
    is_fast: bool
    asked: list[int]
    given: list[int]
    history: list[int] | None

    def encode(self) -> list[Any]:
        """Return what is sent: like the arguments of a call, for which serde is quick.

        `read_advance` is its inverse.
        """
        flags = (
            _RETAIN * self.keeping.retain_graph
            | _CREATE * self.keeping.create_graph
            | _FAST * self.is_fast
        )
        plan = [
            *self.ids[0],
            *self.ids[1],
            self.root,
            flags,
            self.asked,
            self.given,
            self.history,
        ]
        return [self.gradients, {"plan": plan}]


def advance(name: str, value: Any) -> None:
    """Raise MalformedError unless this is a request to take part in a pass."""
    is_pair = type(value) is list and len(value) == 2  # noqa: PLR2004
    if not is_pair or type(value[1]) is not dict or "plan" not in value[1]:
        raise unfit(name, 'an array of [gradients, {"plan": plan}]', value)
    gradients, plan = value[0], value[1]["plan"]
    _GRADIENTS(f"gradients of {name}", gradients)
    _PLAN(f"plan of {name}", plan)
    *_, asked, given, history = plan[:9]
    if len(asked) % 2 or len(given) != 2 * len(gradients) or not (asked or given):
        raise MalformedError(
            f"{name} names {len(asked)} / 2 and {len(given)} / 2 tensors, but brings "
            f"{len(gradients)} gradients"
        )
    for index in (history or [0])[1:]:
        if index >= len(gradients) or gradients[index] is None:
            raise MalformedError(
                f"{name} has a history of gradient {index}, which is missing"
            )
    if history is not None and not history:
        raise MalformedError(f"{name} has a history without a message")


def read_advance(value: Any) -> Advance:
    """Return what a request says that has the form `advance`."""
    gradients, plan = value[0], value[1]["plan"]
    root, flags, *tensors = plan[4:9]
    keeping = Keeping(bool(flags & _RETAIN), bool(flags & _CREATE))
    is_fast = bool(flags & _FAST)
    return Advance(gradients, read_ids(plan[:4]), root, keeping, is_fast, *tensors)


def read_context(value: Sequence[int]) -> ContextId:
    """Return what names a context in a message."""
    creator, serial, *_ = value
    return ContextId(Incarnation(creator), serial)


def read_ids(value: Sequence[int]) -> Ids:
    """Return what names a pass in a message."""
    creator, serial, root, number, *_ = value
    return ContextId(Incarnation(creator), serial), (root, number)


def lines_in(call: asyncio.Future[Any]) -> list[str] | None:
    """Return what a worker has answered that was asked what it waits for, if it has."""
    if not call.done() or call.cancelled() or call.exception() is not None:
        return None
    with suppress(MalformedError):
        _LINES("the answer", call.result())
        return list(call.result())
    return None


def keys_of(received: Iterable[Received]) -> list[int]:
    """Return what names tensors at their sender, in one list."""
    return [part for one in received for part in one.crossing.key]


def by_sender(received: Iterable[Received]) -> dict[WorkerId, list[Received]]:
    """Return received tensors by the worker that sent them."""
    grouped: dict[WorkerId, list[Received]] = {}
    for one in received:
        grouped.setdefault(one.sender, []).append(one)
    return grouped
