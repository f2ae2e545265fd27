"""How the layers above take part in calls: protocols declared here, implemented there.

Remote references, autograd and the optimizer live above the runtime, which must not
know them.  A `Worker` is given its extensions when it is made; `asyncrpc` joins them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

import torch

from asyncrpc.core.ids import Incarnation, RRefId, WorkerId
from asyncrpc.core.options import CallOptions
from asyncrpc.core.serde import Encoded
from asyncrpc.core.services.ports import PeerLink
from asyncrpc.core.services.router import Route
from asyncrpc.errors import Outcome

OnGradient = Callable[[torch.Tensor], torch.Tensor]

TRACE: Final = "t"  # in the meta of a request: the span that it belongs to
NOTE: Final = "n"  # in the meta of an answer: what its worker tells beside it


class Pins(Protocol):
    """What a sent message relies on until its receiver has taken it over."""

    def on_sent(self) -> None:
        """The last byte has been handed to the transport."""

    def undo(self) -> None:
        """Take the counts back: the message was not sent whole, so it was not read."""


class RefusedFunction(NamedTuple):
    """Takes the place of a function that cannot be run.

    Attributes:
        error: the reason, for the caller.
        outcome: whether what the caller asks for has happened all the same.
    """

    error: BaseException
    outcome: Outcome = Outcome.NOT_EXECUTED


class References(Protocol):
    """Values that are referred to from elsewhere; also a `serde.Hooks`.

    Encoding and decoding are synchronous, so "the message at hand" is state of this
    object between `begin_*` and `end_*`.
    """

    handled: tuple[type, ...]

    @property
    def values_held(self) -> int:
        """How many values this worker keeps for references; from any thread."""

    @property
    def lifted(self) -> int:
        """Number of references that the message at hand has brought so far."""

    def lower(self, value: Any) -> object:
        """Return what travels in place of a reference."""

    def lift(self, tree: Any) -> object:
        """Make the reference again."""

    def begin_encode(self, link: PeerLink) -> None:
        """A message to the other end of `link` is about to be encoded."""

    def end_encode(self, *, sent: bool) -> Pins | None:
        """End the encoding of a message; not `sent`: it failed, and nothing leaves."""

    def begin_decode(self, link: PeerLink) -> None:
        """A message from the other end of `link` is about to be decoded."""

    def end_decode(self) -> Any:
        """End the decoding of a message, which was read or could not be.

        Its sender counts every reference in it as arrived, so a message that is not
        read must be lifted and let go of.
        """

    def settle_loans(self, link: PeerLink, loans: Any, *, answered: bool) -> list[int]:
        """Settle the loans of a call that is over, or whose result was handed on."""

    def take_back(self, from_: Incarnation, tokens: Iterable[int]) -> None:
        """A worker has returned these loans."""

    def resolve(
        self,
        link: PeerLink,
        target: list[Any],
        ready: Callable[[Callable[..., Any] | RefusedFunction], None],
    ) -> RRefId | None:
        """Call `ready` with the function that `target` names, now or later."""

    def start_remote(
        self,
        to: str,
        target: str | None,
        values: tuple[list[Any], dict[str, Any]],
        *,
        options: CallOptions,
    ) -> Any:
        """Start a call whose result stays on the callee; return the reference."""

    def fulfil(self, rref_id: tuple[int, int], value: Any) -> None:
        """The function that makes a value has returned it."""

    def fail(
        self,
        rref_id: tuple[int, int],
        error: BaseException,
        outcome: Outcome = Outcome.EXECUTED,
    ) -> None:
        """The function that makes a value has raised, or was refused."""

    def expect(self, link: PeerLink, rref_id: tuple[int, int]) -> None:
        """A function is about to make this value for the other end of `link`."""


class Propagator(Protocol):
    """State that travels with every call: an autograd context, a trace.

    Attributes:
        key: of its part of a message's meta; one or two letters.
        variable: holds the state; where it is None, `outgoing` is not called.
    """

    key: str
    variable: ContextVar[Any]

    def outgoing(self, link: PeerLink, encoded: Encoded) -> Any:
        """Return the metadata for a message, None for nothing.

        Called in the context of the caller (for a request) or of the function (for a
        response).
        """

    def incoming(self, link: PeerLink, meta: Any) -> OnGradient | None:
        """A message brought `meta`; return what makes its tensors differentiable."""

    def decoded(self, on_gradient: OnGradient) -> None:
        """All tensors of a message have gone through what `incoming` returned."""

    def enter(self, meta: Any) -> None:
        """Set the context variables of the function that a request runs."""


class ThreadState(Protocol):
    """torch's state of a thread that travels with calls.

    It is asked for in the thread that makes a call, even if that is sent from another
    one, or later.
    """

    key: str  # as of a `Propagator`

    def here(self) -> Any:
        """Return the metadata for a call of this thread, None for nothing."""

    def surround(self, meta: Any, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return what a request runs in place of its function."""


class CallSpan(Protocol):
    """What a trace shows of a call, or of a stream, at one of its two ends."""

    @property
    def meta(self) -> Any:
        """What travels with the request, under `TRACE`; None: nothing."""

    def noted(self, name: str, value: float) -> None:
        """Add a value that is known only now."""

    def failed(self, error: BaseException) -> None:
        """It fails with this error, and is about to end."""

    def end(self, outcome: str, *, items: int | None = None) -> None:
        """End it, unless it has ended.

        Args:
            outcome: how, as events of `asyncrpc.trace` tell it.
            items: of a stream: how many came, or were sent.
        """


class RequestSpan(Protocol):
    """What a trace shows of a request to a web application."""

    def routed(self, route: str) -> None:
        """Add the pattern that its path matches, which is known only now."""

    def answered(self, status: int) -> None:
        """It is answered with this status of HTTP."""

    def closed(self, code: int, *, has_failed: bool) -> None:
        """Its websocket was closed with this code, by the application or its client."""


class CallTracer(Protocol):
    """Shows the calls of a worker in traces.

    Each method is called in the context of what it shows: of the program that calls, or
    of the function that runs.  No method raises.
    """

    def called(
        self,
        function: str,
        to: str,
        *,
        attempt_of: Any = None,
        is_repeated: bool = False,
    ) -> CallSpan:
        """Show a call, or a stream, from now on, at its caller.

        Args:
            function: its name.
            to: name of the callee.
            attempt_of: the span of the repeated call that this is an attempt of.
            is_repeated: whether the call may have several attempts.
        """

    def served(
        self, function: str, caller: str, meta: Any, *, waited_s: float
    ) -> CallSpan:
        """Show a call, or a stream, at its callee, and make it the current one.

        Args:
            function: its name.
            caller: name of the caller.
            meta: what came with the request, unchecked; None: nothing.
            waited_s: seconds that the request has been here.
        """

    def generation(self, name: str) -> CallSpan:
        """Show items that are made here, from now on, as part of what is current.

        Args:
            name: of the generator.
        """

    def here(self) -> Any:
        """Return what is current, for `batch`; None: nothing."""

    def batch(
        self, function: str, members: Sequence[Any]
    ) -> AbstractContextManager[None]:
        """Show a function that works for several requests at once.

        Args:
            function: its name.
            members: what `here` returned for each request.
        """

    def request(
        self, method: str, route: str, path: str, parent: tuple[str, str]
    ) -> AbstractContextManager[RequestSpan]:
        """Show a request to a web application, unless something shows it already.

        Args:
            method: of HTTP.
            route: the pattern that its path matches; empty if it is not known.
            path: as the client wrote it.
            parent: its headers `traceparent` and `tracestate`, unchecked; empty if
                the request has none.
        """


class Service(Protocol):
    """A part of the worker that other workers send messages to."""

    name: str

    @property
    def routes(self) -> Iterable[Route]:
        """Return the messages that it takes, each with its handler."""

    def on_peer_lost(self, peer: WorkerId, reason: str) -> None:
        """A worker is gone, or cannot be reached any more."""

    async def close(self) -> None:
        """Stop, and release everything: the worker ends.

        Raises:
            Exception: is logged; the worker ends all the same.

        Cancellation:
            It is not cancelled.
        """


@runtime_checkable
class WantsAddresses(Protocol):
    """A `Service` that can be reached at the worker's addresses in a way of its own."""

    def on_listening(self, addresses: Sequence[str]) -> None:
        """The worker listens, and has not met the others yet."""


@runtime_checkable
class HoldsForPeers(Protocol):
    """A `Service` that keeps what peers make it keep."""

    def held_for(self, peer: Incarnation, /) -> int:
        """Return how many bytes that takes, for the account of a peer."""


@runtime_checkable
class RemembersLost(Protocol):
    """A `Service` that remembers which workers were lost."""

    def on_peer_back(self, peer: WorkerId) -> None:
        """Begin anew with a worker that was lost and is back."""
