"""The messages of autograd; docs/reference/wire-protocol.md has them all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import torch

from asyncrpc.core.autograd.engine import Keeping
from asyncrpc.core.autograd.functions import Received
from asyncrpc.core.autograd.machine import PassReport
from asyncrpc.core.ids import ContextId, Incarnation, WorkerId
from asyncrpc.core.services.schema import (
    Count,
    Leading,
    Notice,
    RecordSchema,
    Request,
    Spread,
    message,
)
from asyncrpc.errors import MalformedError

SERVICE: Final = "autograd"


class PassId(NamedTuple):
    """One backward pass: the worker that began it, and its number there."""

    root: Incarnation
    number: int


class PassIds(NamedTuple):
    """A pass and its context."""

    context_id: Spread[ContextId]
    pass_id: Spread[PassId]


def check_gradients(brought: Advance | PassAnswer) -> None:
    """Check that the fields of a message with gradients fit together."""
    gradients, history = brought.gradients, brought.history
    asked_length, given_length = len(brought.asked), len(brought.given)
    if asked_length % 2 or given_length != 2 * len(gradients):
        raise MalformedError(
            f"the message names {asked_length} / 2 and {given_length} / 2 tensors, but "
            f"has {len(gradients)} gradients"
        )
    if history is None:
        return
    if not history:
        raise MalformedError("the history of gradients names no message")
    for index in history[1:]:
        if index >= len(gradients) or gradients[index] is None:
            raise MalformedError(
                f"the history of gradients has gradient {index}, which is missing"
            )


class PassAnswer(NamedTuple):
    """The answer of a worker that was asked to take part in a pass.

    The gradients are of tensors that the asking worker has sent: they go with the
    answer in place of an `Advance`, if nothing else is under way.

    Attributes:
        gradients: of the tensors in `given`.
        reports: the last report of each known worker.
        asked: as in `Advance`.
        given: as in `Advance`.
        history: as in `Advance`.
        step: the answer to the step in the request, if it was taken; this worker has
            committed the pass then.
    """

    gradients: Leading[list[torch.Tensor | None]]
    reports: list[PassReport]
    asked: list[int]
    given: list[int]
    history: list[int] | None
    step: list[Any] | None


@message(SERVICE, "advance", about="tensors that the receiver has sent to the sender")
class Advance(Request[PassAnswer]):
    """Take part in a pass, with gradients that have come and those that will.

    Attributes:
        gradients: of the tensors in `given`.
        ids: of the context and the pass.
        root: name of the worker that began it.
        keeping: whether the graph is kept.
        is_fast: whether every sent tensor is assumed to take part.
        asked: pairs of message and position: tensors whose gradient comes later.
        given: pairs for tensors whose gradient is in this message.
        history: the message, then indices of gradients that have a history.
        step: a step of an optimizer to take after the pass, as `optim.step` brings it.
            The worker that began the pass has nothing left to do but to hear from the
            receiver: if that has asked nobody else, the pass has succeeded.
        votes_on: the number of an optimizer of that worker: who has a part of it votes
            in its reports on the step that is to follow.
    """

    gradients: Leading[list[torch.Tensor | None]]
    ids: Spread[PassIds]
    root: str
    keeping: Spread[Keeping]
    is_fast: bool
    asked: list[int]
    given: list[int]
    history: list[int] | None
    step: list[Any] | None
    votes_on: Count | None

    def check(self) -> None:
        """Check that the fields fit together."""
        check_gradients(self)
        if not self.asked and not self.given:
            raise MalformedError("the message names no tensor")


@message(
    SERVICE, "close", about="a pass that the sender asked the receiver to take part in"
)
class ClosePass(Request[PassAnswer]):
    """No further workers take part in a pass."""

    ids: Spread[PassIds]


@message(
    SERVICE, "waits", about="a pass that the sender asked the receiver to take part in"
)
class AskWaits(Request[list[str]]):
    """Ask what a pass waits for.

    Attributes:
        ids: of the context and the pass.
        asked: the workers that have been asked, one for another.
    """

    ids: Spread[PassIds]
    asked: list[int]


@message(SERVICE, "outcome", about="a pass that the receiver began")
class PassOutcome(Request[bool]):
    """Ask, once a pass has ended, whether it succeeded."""

    ids: Spread[PassIds]


@message(SERVICE, "join", about="a context that the receiver opened")
class JoinContext(Request[bool]):
    """Ask to be told when a context ends, and whether it is open."""

    context_id: Spread[ContextId]


@message(
    SERVICE,
    "release",
    about="a context that the sender opened, or brought to the receiver",
    may_wait_s=20e-3,
)
class ReleaseContext(Notice):
    """A context has ended.

    Its state is let go a little later: a training loop sends its next message soon.
    """

    context_id: Spread[ContextId]


@message(
    SERVICE,
    "commit",
    about="a pass that the sender began, or asked the receiver to take part in",
    may_wait_s=1e-3,
)
class CommitPass(Notice):
    """A pass has succeeded.  As a rule the request of a step follows at once."""

    ids: Spread[PassIds]


@message(
    SERVICE,
    "abort",
    about="a pass that the sender began, or asked the receiver to take part in",
)
class AbortPass(Notice):
    """A pass has failed."""

    ids: Spread[PassIds]


class Meta(NamedTuple):
    """The metadata of a context in a call; its creator's name may follow.

    Attributes:
        context_id: of the context.
        message: the serial of the call; 0 if no tensor in it requires a gradient.
    """

    context_id: Spread[ContextId]
    message: int


_META: Final = RecordSchema(Meta)


def read_meta(meta: Any) -> tuple[ContextId, int, str]:
    """Return the context in a message: its id, a serial, its creator's name."""
    context_id, serial = _META.read_as("the metadata of an autograd context", meta)
    _, _, _, *more = meta
    name = more[0] if more and type(more[0]) is str else ""
    return context_id, serial, name


def keys_of(received: Iterable[Received]) -> list[int]:
    """Return the keys of tensors at their sender, in one list."""
    return [part for leaf in received for part in leaf.crossing.key]


def by_sender(received: Iterable[Received]) -> dict[WorkerId, list[Received]]:
    """Return received tensors by the worker that sent them."""
    grouped: dict[WorkerId, list[Received]] = {}
    for leaf in received:
        grouped.setdefault(leaf.sender, []).append(leaf)
    return grouped
