"""The router of a worker: which handler takes which message of which service.

A service lists what it takes, each message with its handler:

    routes = (answers(Advance, self.on_advance), takes(Commit, self.on_commit))

What arrives is read and checked before its handler sees it, and what a handler returns
is written as the message says of its answer.  A message with invalid content, or of a
peer that may not send it, is refused before anything has changed; the error names the
worker, the message and the part that is invalid, and says what it must be.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final, TypeAlias, TypeVar

from asyncrpc.core.arguments import check_callable, wrong
from asyncrpc.core.services.ports import PeerLink
from asyncrpc.core.services.schema import (
    WORKERS,
    Notice,
    Request,
    Sender,
    UnfitError,
    not_by,
    refusal,
)
from asyncrpc.core.wire.frames import unpack_head
from asyncrpc.errors import MalformedError

N = TypeVar("N", bound=Notice)
R = TypeVar("R", bound=Request[Any])

# Of a service that is loaded later: see `Router.later`.
LaterRoute: TypeAlias = Callable[[bytes, object, bool], "Route | None"]

# Heads that say more than service and method (a device map) are remembered up to so
# many, and if they are so short.
HEADS_MAX: Final = 256
HEAD_BYTES_MAX: Final = 256


class Route:
    """The way of one message to its handler.

    Attributes:
        service: that takes it.
        method: the message's name.
        name: both.
        handle: given the link and the content as it has come; of a request a coroutine
            function that returns the answer as it travels.
        is_answered: whether it is of a request.
        takes_payload: whether a large payload may come with it.
        by: the kinds of peer that may send it.
    """

    __slots__ = (
        "by",
        "handle",
        "is_answered",
        "method",
        "name",
        "service",
        "takes_payload",
    )

    def __init__(
        self,
        service: str,
        method: str,
        handle: Callable[[PeerLink, Any], Any],
        *,
        is_answered: bool,
        takes_payload: bool = False,
        by: Sender = WORKERS,
    ) -> None:
        self.takes_payload = takes_payload
        self.service, self.method, self.name = service, method, f"{service}.{method}"
        self.handle = handle
        self.is_answered = is_answered
        self.by = by


def takes(kind: type[N], handler: Callable[[Any, N], None]) -> Route:
    """Return the route of a notice to its handler, which is given link and notice.

    Raises:
        UsageError: `kind` is no class of notices, or `handler` cannot be called.
    """
    _check(kind, Notice, handler)
    read, is_for_guests = kind.record.read, Sender.GUEST in kind.by

    def take(link: PeerLink, value: Any) -> None:
        if not is_for_guests and link.is_guest:
            raise not_by(link.peer.name, Sender.GUEST, kind.name, kind.by)
        try:
            notice = read(value)
        except UnfitError as error:
            raise refusal(link.peer.name, kind.name, error) from None
        handler(link, notice)

    return Route(
        kind.service,
        kind.method,
        take,
        is_answered=False,
        takes_payload=kind.record.holds_buffers,
        by=kind.by,
    )


def answers(
    kind: type[R],
    handler: Callable[[Any, R], Awaitable[Any]],
) -> Route:
    """Return the route of a request to its handler, which returns the answer.

    Raises:
        UsageError: `kind` is no class of requests, or `handler` cannot be called.
    """
    _check(kind, Request, handler)
    read, write = kind.record.read, kind.answer.write
    is_for_guests = Sender.GUEST in kind.by

    async def reply(link: PeerLink, value: Any) -> Any:
        if not is_for_guests and link.is_guest:
            raise not_by(link.peer.name, Sender.GUEST, kind.name, kind.by)
        try:
            return write(await handler(link, read(value)))
        except (UnfitError, MalformedError) as error:
            raise refusal(link.peer.name, kind.name, error) from error

    return Route(
        kind.service,
        kind.method,
        reply,
        is_answered=True,
        takes_payload=kind.record.holds_buffers,
        by=kind.by,
    )


def _check(kind: object, base: type, handler: object) -> None:
    if not (isinstance(kind, type) and issubclass(kind, base)):
        raise wrong("kind", f"a subclass of {base.__name__}", kind)
    if not hasattr(kind, "record"):
        raise wrong("kind", "declared with @message(service, method)", kind)
    check_callable("handler", handler)


class Router:
    """The routes of one worker.

    Attributes:
        notices: by the heads that they come with.
        requests: by the heads that they come with.
        later: of services whose code is not loaded yet: what returns the route of a
            message, given its head, its method, and whether it is of a request; None:
            the routes of the service have been added meanwhile.
    """

    def __init__(self) -> None:
        self.notices: dict[bytes, Route] = {}
        self.requests: dict[bytes, Route] = {}
        self.later: dict[str, LaterRoute] = {}
        self._known: dict[str, dict[tuple[bool, str], Route]] = {}

    def add(self, service: str, routes: Iterable[Route]) -> None:
        """Take the messages of one more service."""
        known = self._known.setdefault(service, {})
        for route in routes:
            known[route.is_answered, route.method] = route

    def notice(self, head: bytes) -> Route:
        """Return the route of a notice that is not known by its head yet.

        An unknown notice has a route as well: it leads to an error.
        """
        return self._resolve(head, self.notices, is_answered=False)

    def request(self, head: bytes) -> Route:
        """Return the route of a request; see `notice`."""
        return self._resolve(head, self.requests, is_answered=True)

    def _resolve(
        self, head: bytes, heads: dict[bytes, Route], *, is_answered: bool
    ) -> Route:
        record = unpack_head(head)
        if len(record) < 2:  # noqa: PLR2004
            raise MalformedError("a message names no service")
        service, method, *_ = record
        later = self.later.get(service) if type(service) is str else None
        if later is not None:
            route = later(head, method, is_answered)
            if route is not None:
                return route
        known = self._known.get(service) if type(service) is str else None
        if known is None:
            problem = f"there is no service {service!r:.80}"
            return _unknown(service, method, problem, is_answered=is_answered)
        route = known.get((is_answered, method)) if type(method) is str else None
        if route is None:
            names = [repr(name) for kind, name in known if kind is is_answered]
            problem = (
                f"{f'{service}.{method}'!r:.80}, which this worker does not know; "
                f"known: {', '.join(names) or 'none of its kind'}"
            )
            return _unknown(service, method, problem, is_answered=is_answered)
        if len(heads) < HEADS_MAX and len(head) <= HEAD_BYTES_MAX:
            heads[head] = route
        return route


def _unknown(service: Any, method: Any, problem: str, *, is_answered: bool) -> Route:
    """Return the route of an unknown message: it leads to an error."""

    def take(link: PeerLink, _value: Any) -> None:
        raise MalformedError(
            f"worker {link.peer.name!r} sent a wrong message: {problem}"
        )

    async def reply(link: PeerLink, value: Any) -> None:
        take(link, value)

    handle = reply if is_answered else take
    return Route(service, method, handle, is_answered=is_answered)
