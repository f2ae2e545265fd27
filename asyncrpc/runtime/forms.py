"""What the content of a message must be: declared once, checked before it is acted on.

A peer that has proved who it is may still send what makes no sense.  Each service
declares its methods (`Methods`): what each takes, as a `Form`, and what takes it.  So a
message whose content is wrong is refused whole, before anything has changed, and the
error says which part of which message of whom was wrong, and what it must be.

Arrays grow at their end: fields beyond those that a form names are ignored.

Nearly all messages are right, so the names of their parts are put together only for
one that is not: it is then looked at again.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Mapping
from types import UnionType
from typing import Any, Final, TypeAlias

import torch

from asyncrpc.arguments import shown
from asyncrpc.errors import MalformedError
from asyncrpc.runtime.ports import PeerLink
from asyncrpc.runtime.router import Route, blamed

# Raises MalformedError, which calls what is wrong by the name that is given.
Form: TypeAlias = Callable[[str, Any], None]
Handler: TypeAlias = Callable[..., Any]


def unfit(name: str, wanted: str, value: object) -> MalformedError:
    """Return the error about a part of a message that is not what it must be."""
    return MalformedError(f"{name} must be {wanted}, not {shown(value)}")


def whole(low: int, stop: int, wanted: str) -> Form:
    """Return the form of an integer from `low` up to, but not including, `stop`."""

    def check(name: str, value: Any) -> None:
        if type(value) is not int or not low <= value < stop:
            raise unfit(name, wanted, value)

    return check


def of_kind(kind: type | UnionType, wanted: str) -> Form:
    """Return the form of an instance of a class; True is no integer."""

    def check(name: str, value: Any) -> None:
        if not isinstance(value, kind) or type(value) is bool is not kind:
            raise unfit(name, wanted, value)

    return check


def one_of(words: Mapping[str, object]) -> Form:
    """Return the form of one of these words."""
    wanted = f"one of {', '.join(map(repr, words))}"

    def check(name: str, value: Any) -> None:
        if type(value) is not str or value not in words:
            raise unfit(name, wanted, value)

    return check


def maybe(form: Form) -> Form:
    """Return the form of something that may be nil instead."""

    def check(name: str, value: Any) -> None:
        if value is not None:
            form(name, value)

    return check


def each(form: Form) -> Form:
    """Return the form of an array all of whose elements are alike."""

    def check(name: str, value: Any) -> None:
        if not isinstance(value, list | tuple):
            raise unfit(name, "an array", value)
        for index, part in enumerate(value):
            try:
                form(name, part)
            except MalformedError:
                form(f"element {index} of {name}", part)  # raises, with its whole name
                raise

    return check


def array(**fields: Form) -> Form:
    """Return the form of an array that has these fields, in this order, or more."""
    wanted = f"an array of [{', '.join(fields)}]"
    forms = tuple(fields.items())

    def check(name: str, value: Any) -> None:
        if not isinstance(value, list | tuple) or len(value) < len(forms):
            raise unfit(name, wanted, value)
        for (field, form), part in zip(forms, value, strict=False):
            try:
                form(name, part)
            except MalformedError:
                form(f"{field} of {name}", part)  # raises, with its whole name
                raise

    return check


def mask(size: int) -> Form:
    """Return the form of bits by rank, for that many ranks: bytes, little-endian."""
    most = (size + 7) // 8

    def check(name: str, value: Any) -> None:
        is_mask = type(value) is bytes and len(value) <= most
        if not is_mask or int.from_bytes(value, "little") >> size:
            raise unfit(name, f"bits of {size} ranks in bytes", value)

    return check


def anything(_name: str, _value: Any) -> None:
    """Take whatever it is: who acts on it looks for itself."""


def nothing(name: str, value: Any) -> None:
    """Take nil only."""
    if value is not None:
        raise unfit(name, "nil", value)


ID: Final = whole(0, 1 << 64, "an unsigned integer of 64 bits")
COUNT: Final = whole(0, 1 << 63, "an integer of at least 0")
POSITIVE: Final = whole(1, 1 << 63, "an integer of at least 1")
NUMBER: Final = whole(-1, 1 << 63, "an integer of at least -1")
FLAG: Final = of_kind(bool, "true or false")
TEXT: Final = of_kind(str, "a text")
BYTES: Final = of_kind(bytes, "bytes")
LIST: Final = of_kind(list, "a list")
MAP: Final = of_kind(dict, "a map")
REAL: Final = of_kind(float | int, "a number")
TENSOR: Final = of_kind(torch.Tensor, "a tensor")


class Methods:
    """The methods of one service: what each takes, and what takes it."""

    __slots__ = ("_known", "_service")

    def __init__(self, service: str, known: Mapping[str, tuple[Form, Handler]]) -> None:
        """Declare methods, by name: the form of the value, and its handler."""
        self._service = service
        self._known = dict(known)

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def find(self, peer: str, method: str, value: Any) -> Handler:
        """Return what takes a message whose value has the right form.

        Args:
            peer: name of the worker that sent it.
            method: of the message, one of those declared.
            value: of the message.

        Raises:
            MalformedError: the method takes something else.
        """
        form, handler = self._known[method]
        try:
            form(method, value)
        except MalformedError:
            raise self._refusal(peer, form, method, value) from None
        return handler

    def _refusal(
        self, peer: str, form: Form, method: str, value: Any
    ) -> MalformedError:
        """Return the error about a value that has not its form, in whole words."""
        try:
            form(repr(f"{self._service}.{method}"), value)
        except MalformedError as error:
            return MalformedError(f"worker {peer!r} sent what is wrong: {error}")
        return MalformedError(f"worker {peer!r} sent what is wrong: {method}")


class ServiceMethods:
    """A `runtime.extensions.Service` whose methods are declared.

    Attributes:
        requests: those that are answered; handlers are awaited.
        notices: those that are not; handlers are given the link and the value.
    """

    name: str
    requests: Methods
    notices: Methods

    @property
    def routes(self) -> list[Route]:
        """The messages that it takes, each with its handler."""
        return [
            *(
                Route(self.name, one, self._take(one), is_answered=False)
                for one in self.notices
            ),
            *(
                Route(self.name, one, self._reply(one), is_answered=True)
                for one in self.requests
            ),
        ]

    def _take(self, method: str) -> Callable[[PeerLink, Any], None]:
        def take(link: PeerLink, value: Any) -> None:
            self.notices.find(link.peer.name, method, value)(link, value)

        return take

    def _reply(
        self, method: str
    ) -> Callable[[PeerLink, Any], Coroutine[Any, Any, Any]]:
        async def reply(link: PeerLink, value: Any) -> Any:
            handler = self.requests.find(link.peer.name, method, value)
            try:
                return await handler(*self.given(link, value))
            except MalformedError as error:
                name = f"{self.name}.{method}"
                raise blamed(link.peer.name, name, error) from error

        return reply

    def given(self, link: PeerLink, value: Any) -> tuple[Any, ...]:
        """Return what the handler of a request is given."""
        return link, value
