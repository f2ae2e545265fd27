"""Messages between services, and how records travel: what types say is checked.

A record is a dataclass or a named tuple.  It travels as an array of its fields, in
their order:

    int                     an unsigned integer of 64 bits, unless annotated otherwise
    bool, str, bytes        themselves; True is not an integer
    float                   a number
    list[T], tuple[T, ...]  an array of T
    dict, list, Any         a map, a list, anything: the handler checks it
    T | None                a T, or nil
    Annotated[E, EnumName(E)] a member of an enum, as its name
    Annotated[int, Bits()]  a set of bits, as bytes
    a record                an array of its fields
    Spread[a record]        its fields, in place of an array of them
    Leading[list[T]]        the first field, in front: `[array, {"fields": [...]}]`
    another class           an instance of it, a tensor for example

Arrays grow at their end: what follows the fields that a record has is ignored.

Reading checks: a record that is not right is refused whole, by an error that names the
part that is wrong.

A message between the services of workers is declared once, as a record:

    @message("rref", "register")
    class Register(Notice):
        rref_id: Spread[RRefId]

Its fields say what travels; a `Router` reads it, checks it, and gives it
to its handler.  So handler and sender see fields by their names and types.

A message also says which kinds of peer may send it, and of whom: `by` is checked by the
router, `about` by its handler.

A notice is not answered.  A request is, by what its type argument says:

    @message("autograd", "outcome")
    class Outcome(Request[bool]): ...
"""

from __future__ import annotations

import enum
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from operator import attrgetter, itemgetter
from typing import (
    Annotated,
    Any,
    ClassVar,
    Final,
    Generic,
    NoReturn,
    TypeAlias,
    TypeVar,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

from asyncrpc.core.arguments import check_kind, check_seconds, check_text, shown, wrong
from asyncrpc.core.wire.frames import pack_head
from asyncrpc.errors import MalformedError, Outcome, RejectedError

FIELDS: Final = "fields"

T = TypeVar("T")


class UnfitError(Exception):
    """A part of a value that has arrived is not what it must be.

    Attributes:
        path: the names of that part and of what it is a part of, the innermost first.
    """

    def __init__(self, wanted: str, value: object, *path: str) -> None:
        super().__init__(wanted, value)
        self.path = [*path]

    def let_go(self) -> None:
        """Keep the words alone: what a peer has sent may be large, and is its own."""
        self.args = (str(self),)

    def __str__(self) -> str:
        if len(self.args) == 1:
            return str(self.args[0])
        wanted, value = self.args
        name = " of ".join(self.path) or "the content"
        return f"{name} must be {wanted}, not {shown(value)}"


class Kind:
    """What a value must be, and how it travels.

    Attributes:
        holds_buffers: whether a part of it may be a tensor, or long bytes.
        is_unchanged: whether `write` returns its argument.
        only: the one type of all right values, which `read` does not change; None:
            there are several.  A record checks such values without a call of `read`.
        low: integers from here up to, but not including, `stop` are right.
        stop: see there.
        shape: as the documentation shows it; empty: the field's name.
    """

    __slots__ = ()

    holds_buffers = False
    is_unchanged = True
    only: type | None = None
    low = stop = 0
    shape = ""

    def read(self, value: Any) -> Any:
        """Return a value that has arrived, or raise UnfitError."""
        return value

    def write(self, value: Any) -> Any:
        """Return what travels."""
        return value

    def read_as(self, name: str, value: Any) -> Any:
        """Return a value that has arrived.

        Args:
            name: what the value is called in errors.
            value: as it has travelled.

        Raises:
            MalformedError: `value` is not of this kind.
        """
        try:
            return self.read(value)
        except UnfitError as error:
            error.path.append(name)
            raise MalformedError(str(error)) from None


class Anything(Kind):
    """A value that only its handler can check."""

    holds_buffers = True


class Exact(Kind):
    """A value of one of some types, of no subclass of them."""

    def __init__(self, wanted: str, *exact: type, holds_buffers: bool = False) -> None:
        self.holds_buffers = holds_buffers
        self._wanted, self._exact = wanted, exact
        self.only = exact[0] if len(exact) == 1 else None

    def read(self, value: Any) -> Any:
        if type(value) in self._exact:
            return value
        raise UnfitError(self._wanted, value)


class Integer(Kind):
    """An integer from `low` up to, but not including, `stop`."""

    only = int

    def __init__(self, low: int, stop: int, wanted: str) -> None:
        self.low, self.stop, self._wanted = low, stop, wanted

    def read(self, value: Any) -> Any:
        if type(value) is int and self.low <= value < self.stop:
            return value
        raise UnfitError(self._wanted, value)


class Passing(Kind):
    """A value that passes a test."""

    def __init__(
        self, test: Callable[[Any], bool], wanted: str, shape: str = ""
    ) -> None:
        self._test, self._wanted, self.shape = test, wanted, shape

    def read(self, value: Any) -> Any:
        if self._test(value):
            return value
        raise UnfitError(self._wanted, value)


class Instance(Kind):
    """An instance of a class."""

    holds_buffers = True

    def __init__(self, cls: type) -> None:
        self._cls = cls

    def read(self, value: Any) -> Any:
        if isinstance(value, self._cls):
            return value
        raise UnfitError(f"a {self._cls.__name__.lower()}", value)


class EnumName(Kind):
    """A member of an enum, by its name."""

    is_unchanged = False

    def __init__(self, cls: type[enum.Enum]) -> None:
        self.members = cls.__members__

    def read(self, value: Any) -> Any:
        if type(value) is str and value in self.members:
            return self.members[value]
        raise UnfitError(f"one of {', '.join(map(repr, self.members))}", value)

    def write(self, value: Any) -> Any:
        return value.name


class Bits(Kind):
    """A set of bits, as bytes in little-endian order."""

    is_unchanged = False

    def read(self, value: Any) -> Any:
        if type(value) is bytes:
            return int.from_bytes(value, "little")
        raise UnfitError("bytes", value)

    def write(self, value: Any) -> Any:
        return value.to_bytes((value.bit_length() + 7) // 8, "little")


class Maybe(Kind):
    """A value of another kind, or nil."""

    def __init__(self, inner: Kind) -> None:
        self.inner = inner
        self.holds_buffers = inner.holds_buffers
        self.is_unchanged = inner.is_unchanged
        self.shape = f"{inner.shape or '*'} or nil"

    def read(self, value: Any) -> Any:
        return None if value is None else self.inner.read(value)

    def write(self, value: Any) -> Any:
        return None if value is None else self.inner.write(value)


class Array(Kind):
    """Any number of values of one kind, in a list or a tuple."""

    def __init__(self, inner: Kind, cls: type[list[Any] | tuple[Any, ...]]) -> None:
        self.inner, self._cls = inner, cls
        self.holds_buffers = inner.holds_buffers
        self.is_unchanged = inner.is_unchanged and cls is list
        self.shape = f"[{inner.shape or '*'}, …]"

    def read(self, value: Any) -> Any:
        if type(value) is not list:
            raise UnfitError("an array", value)
        if not value:
            return value if self._cls is list else ()
        parts: list[Any] = []
        try:
            parts.extend(map(self.inner.read, value))  # as far as they are fit
        except UnfitError as error:
            error.path.append(f"element {len(parts)}")
            raise
        return parts if self._cls is list else tuple(parts)

    def write(self, value: Any) -> Any:
        return [*map(self.inner.write, value)]


class RecordSchema(Kind):
    """A record, as an array of its fields.

    Attributes:
        places: the kinds of what is in the array, with names.
        paths: where a record has them, such as "rref_id.creator".
        is_led: whether the first of them goes in front.  So a message looks like the
            arguments of a call, for which serde is quick: a tensor takes a third of
            the time.
        make: returns the record that parts of an array make; it may change the list.
        labels: the names of what travels, in errors about values that cannot be sent.
    """

    is_unchanged = False

    def __init__(self, cls: type) -> None:
        hints = get_type_hints(cls, include_extras=True)
        self.is_led = False
        self.places: list[tuple[str, Kind]] = []
        self.paths: list[str] = []
        self._spreads: list[tuple[slice, RecordSchema]] = []  # the last one first
        for name in _fields_of(cls):
            kind, marks = kind_of(hints[name]), get_args(hints[name])[1:]
            if _SPREAD in marks and isinstance(kind, RecordSchema):
                start = len(self.places)
                self.places += kind.places
                self.paths += [f"{name}.{path}" for path in kind.paths]
                self._spreads.insert(0, (slice(start, len(self.places)), kind))
            else:
                self.is_led |= _LEADING in marks
                self.places.append((name, kind))
                self.paths.append(name)
        self._new: Callable[[list[Any]], Any] = lambda parts: cls(*parts)
        if issubclass(cls, tuple):  # 0.1 us less than by its own `__new__`
            self._new = partial(tuple.__new__, cls)
        self.make = self._make if self._spreads else self._new
        if [places for places, _ in self._spreads] == [slice(0, len(self.places))]:
            whole = self._spreads[0][1].make  # most messages are of one id: 0.2 us less
            self.make = lambda parts: cls(whole(parts))
        self._get = _getter_of(self.paths)
        self._describe()

    def _describe(self) -> None:
        names = [name for name, _ in self.places]
        kinds = [kind for _, kind in self.places]
        shapes = [_shown(name, kind) for name, kind in self.places]
        self.holds_buffers = any(kind.holds_buffers for kind in kinds)
        self.shape = f"[{', '.join(shapes)}]"
        self.labels = tuple(names)
        self._wanted = f"an array of [{', '.join(names)}]"
        if self.is_led:
            self.labels = (names[0], FIELDS)
            self.shape = f'[{shapes[0]}, {{"{FIELDS}": [{", ".join(shapes[1:])}]}}]'
            self._wanted = f'[{names[0]}, {{"{FIELDS}": [{", ".join(names[1:])}]}}]'
        self._size = len(kinds)
        only = [(at, kind) for at, kind in enumerate(kinds) if kind.only]
        if len(only) == 1:
            only = []  # `itemgetter` would return a value, not a tuple of one
        self._get_only = itemgetter(*(at for at, _ in only)) if only else _none_of
        self._only = tuple(kind.only for _, kind in only)
        self._ranges = [(at, kind.low, kind.stop) for at, kind in only if kind.stop]
        checked = {at for at, _ in only}
        self._reads = [
            (at, kind.read) for at, kind in enumerate(kinds) if at not in checked
        ]
        self._writes = [
            (at, kind.write) for at, kind in enumerate(kinds) if not kind.is_unchanged
        ]

    def read(self, value: Any) -> Any:
        array = _in_line(value) if self.is_led else value
        if type(array) is not list or len(array) < self._size:
            raise UnfitError(self._wanted, value)
        parts = array[: self._size]
        if tuple(map(type, self._get_only(parts))) != self._only:
            self._refuse(parts)
        for at, low, stop in self._ranges:
            if not low <= parts[at] < stop:
                self._refuse(parts)
        try:
            for at, read in self._reads:
                parts[at] = read(parts[at])
        except UnfitError as error:
            error.path.append(self.places[at][0])
            raise
        return self.make(parts)

    def _refuse(self, parts: list[Any]) -> NoReturn:
        """Raise the error of the first part that is wrong."""
        for (name, kind), part in zip(self.places, parts, strict=True):
            try:
                kind.read(part)
            except UnfitError as error:
                error.path.append(name)
                raise
        raise AssertionError("a part was found wrong that its kind takes")

    def _make(self, parts: list[Any]) -> Any:
        for places, record in self._spreads:
            parts[places] = [record.make(parts[places])]
        return self._new(parts)

    def write(self, value: Any) -> Any:
        parts = [*self._get(value)]
        for at, write in self._writes:
            parts[at] = write(parts[at])
        return [parts[0], {FIELDS: parts[1:]}] if self.is_led else parts


def _getter_of(paths: list[str]) -> Callable[[Any], Iterable[Any]]:
    """Return the function that returns the attributes of these paths."""
    if len(paths) > 1:
        return attrgetter(*paths)
    getters = [attrgetter(path) for path in paths]
    return lambda record: [get(record) for get in getters]


def _none_of(_parts: list[Any]) -> tuple[()]:
    return ()


def _in_line(value: Any) -> list[Any] | None:
    """Return as one array the fields of which the first came in front."""
    if type(value) is list and len(value) == 2:  # noqa: PLR2004
        front, rest = value
        if type(rest) is dict and type(rest.get(FIELDS)) is list:
            return [front, *rest[FIELDS]]
    return None


def _shown(name: str, kind: Kind) -> str:
    """Return a field as the documentation shows it."""
    return f"{name} or nil" if kind.shape == "* or nil" else kind.shape or name


def _fields_of(cls: type) -> tuple[str, ...]:
    """Return the names of a record's fields."""
    fields = cls.__dict__.get("__dataclass_fields__", cls.__dict__.get("_fields", ()))
    return tuple(fields)


# --- kinds by type -------------------------------------------------------------------

_SPREAD: Final = object()
Spread: TypeAlias = Annotated[T, _SPREAD]
_LEADING: Final = object()
Leading: TypeAlias = Annotated[T, _LEADING]

Count: TypeAlias = Annotated[int, Integer(0, 1 << 63, "an integer of at least 0")]
Positive: TypeAlias = Annotated[int, Integer(1, 1 << 63, "an integer of at least 1")]
Number: TypeAlias = Annotated[int, Integer(-1, 1 << 63, "an integer of at least -1")]
Signed: TypeAlias = Annotated[
    int, Integer(-(1 << 63), 1 << 63, "a signed integer of 64 bits")
]

_NIL: Final = Exact("nil", types.NoneType)
_KINDS: Final[dict[Any, Kind]] = {
    int: Integer(0, 1 << 64, "an unsigned integer of 64 bits"),
    bool: Exact("true or false", bool),
    str: Exact("a text", str),
    bytes: Exact("bytes", bytes, holds_buffers=True),
    float: Exact("a number", float, int),
    dict: Exact("a map", dict, holds_buffers=True),
    list: Exact("a list", list, holds_buffers=True),
    types.NoneType: _NIL,
    None: _NIL,
    Any: Anything(),
}


@cache
def kind_of(hint: Any) -> Kind:
    """Return what a value of a type must be, and how it travels."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        inner, *marks = arguments
        marked = (mark for mark in marks if isinstance(mark, Kind))
        return next(marked, None) or kind_of(inner)
    if origin in (Union, types.UnionType) and types.NoneType in arguments:
        (inner,) = (other for other in arguments if other is not types.NoneType)
        return Maybe(kind_of(inner))
    if origin is tuple or (origin is list and arguments != (Any,)):
        return Array(kind_of(arguments[0]), origin)
    plain = getattr(hint, "__supertype__", origin or hint)
    if plain in _KINDS:
        return _KINDS[plain]
    return RecordSchema(plain) if _fields_of(plain) else Instance(plain)


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
