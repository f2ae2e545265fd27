"""Messages between the services of workers: each is declared once, as a record.

    @message("rref", "register")
    class Register(Notice):
        rref_id: Spread[RRefId]

Its fields say what travels (see `schema`); a `Router` reads it, checks it, and gives it
to its handler.  So handler and sender see fields by their names and types.

A message also says which kinds of peer may send it, and of whom: `by` is checked by the
router, `about` by its handler.

A notice is not answered.  A request is, by what its type argument says:

    @message("autograd", "outcome")
    class Outcome(Request[bool]): ...
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import (
    Any,
    ClassVar,
    Final,
    Generic,
    TypeVar,
    dataclass_transform,
    get_args,
    get_origin,
)

from asyncrpc.core.arguments import check_kind, check_seconds, check_text, wrong
from asyncrpc.core.services.schema import Kind, RecordSchema, UnfitError, kind_of
from asyncrpc.core.wire.messages import pack_head
from asyncrpc.errors import MalformedError, Outcome, RejectedError

A = TypeVar("A")
M = TypeVar("M", bound="Message")


class Sender(enum.Flag):
    """The kinds of peer that may send a message.

    A member has proved the secret, or shown a certificate; a guest, a token; and an
    observer, which is no worker, has proved the secret only to look.
    """

    MEMBER = enum.auto()
    GUEST = enum.auto()
    OBSERVER = enum.auto()


MEMBERS: Final = Sender.MEMBER
WORKERS: Final = Sender.MEMBER | Sender.GUEST
LOOKERS: Final = Sender.MEMBER | Sender.OBSERVER


def names_of(senders: Sender) -> str:
    """Return kinds of peer as the documentation and errors name them."""
    return ", ".join(str(sender.name).lower() for sender in senders)


class Message:
    """A record that one service sends to the same service of another worker.

    Attributes:
        service: its name.
        method: the message's name.
        name: both, for errors.
        head: both, as they travel.
        record: its fields, and how they travel.
        labels: the names of its fields in errors about values that cannot be sent.
        by: the kinds of peer that may send it.
        about: of whom it may speak, as the protocol's page says it.
    """

    __slots__ = ()

    service: ClassVar[str]
    method: ClassVar[str]
    name: ClassVar[str]
    head: ClassVar[bytes]
    record: ClassVar[RecordSchema]
    labels: ClassVar[tuple[str, ...]] = ()
    by: ClassVar[Sender] = WORKERS
    about: ClassVar[str] = ""

    def pack(self) -> list[Any]:
        """Return the content as it travels."""
        content: list[Any] = self.record.write(self)
        return content


class Notice(Message):
    """A message that is not answered.

    Attributes:
        may_wait_s: how long it may wait for another message to go with; 0: it goes in
            the loop's next turn.
    """

    __slots__ = ()

    may_wait_s: ClassVar[float] = 0.0


class Request(Message, Generic[A]):
    """A message that is answered by an `A`.

    Attributes:
        answer: what the answer is, and how it travels.
    """

    __slots__ = ()

    answer: ClassVar[Kind]

    @classmethod
    def read_answer(cls, peer: str, value: Any) -> A:
        """Return an answer that has arrived.

        Args:
            peer: name of the worker that sent it.
            value: as it has travelled.

        Raises:
            MalformedError: `value` is not such an answer.
        """
        name = f"the answer of worker {peer!r} to {cls.name!r}"
        answer: A = cls.answer.read_as(name, value)
        return answer


@dataclass_transform(frozen_default=True)
def message(
    service: str,
    method: str,
    *,
    about: str = "",
    by: Sender = WORKERS,
    may_wait_s: float = 0.0,
) -> Callable[[type[M]], type[M]]:
    """Make a class a message, whose fields are those of a dataclass.

    It is frozen for the type checker alone: that saves 0.2 us for each that is made.

    Args:
        service: that sends and takes it.
        method: its name among those of the service.
        about: of whom it may speak.
        by: the kinds of peer that may send it.
        may_wait_s: of a notice.

    Raises:
        UsageError: an argument is of another kind, or the class is no message.
    """
    check_text("service", service)
    check_text("method", method)
    check_kind("about", about, str, "a string")
    check_kind("by", by, Sender, "MEMBERS, WORKERS or LOOKERS")
    check_seconds("may_wait_s", may_wait_s, at_least=0.0)

    def declare(cls: type[M]) -> type[M]:
        if not (isinstance(cls, type) and issubclass(cls, Notice | Request)):
            raise wrong("a message", "a subclass of Notice or Request", cls)
        message_class = dataclass(slots=True)(cls)
        message_class.service, message_class.method, message_class.name = (
            service,
            method,
            f"{service}.{method}",
        )
        message_class.head = pack_head([service, method])
        message_class.by, message_class.about = by, about
        if issubclass(message_class, Notice):
            message_class.may_wait_s = may_wait_s
        message_class.record = RecordSchema(message_class)
        message_class.labels = message_class.record.labels
        for base in message_class.__dict__.get("__orig_bases__", ()):
            if get_origin(base) is Request:
                message_class.answer = kind_of(*get_args(base))  # type: ignore[union-attr]
        return message_class

    return declare


def not_by(peer: str, sender: Sender, name: str, by: Sender) -> RejectedError:
    """Return the error about a message that this kind of peer may not send."""
    return RejectedError(
        f"{peer!r} ({names_of(sender)}) may not send a {name!r} message; who may: "
        f"{names_of(by)}",
        outcome=Outcome.NOT_EXECUTED,
    )


def refusal(peer: str, name: str, problem: Exception) -> MalformedError:
    """Return the error about a message with invalid content."""
    words = f"worker {peer!r} sent an invalid {name!r} message: {problem}"
    if isinstance(problem, UnfitError):
        problem.let_go()  # an answer tells its context, too
    return MalformedError(words)
