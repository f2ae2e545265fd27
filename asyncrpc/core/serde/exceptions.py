"""Exceptions cross a call as their parts, and are raised again as what they were.

Where an exception was raised it becomes a plain tree: its class by name, text,
arguments, attributes, notes, traceback as text, cause, context and members.  At the
caller it becomes an instance of a class that is both `RemoteError` and the original
class, so that either can be caught.  No constructor is called: its arguments need not
be `args`.

An exception that would end the caller rather than inform it (SystemExit, StopIteration,
the CancelledError of another task) arrives as a plain `RemoteError`; so does one whose
class is not available here.
"""

from __future__ import annotations

import asyncio
import os
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from asyncrpc.core.host.shortage import shortage_of
from asyncrpc.core.serde.dismantling import assemble, dismantle, slots_of
from asyncrpc.errors import (
    CallError,
    DecodeError,
    Outcome,
    OverloadedError,
    RejectedError,
    RemoteError,
)

if TYPE_CHECKING:
    from asyncrpc.core.serde.functions import FunctionTable
    from asyncrpc.core.serde.values import Codec

DEPTH_MAX: Final = 16  # links of a chain of causes; a reader looks at a few
NODES_MAX: Final = 128  # exceptions in one tree, members of groups included
TEXT_MAX: Final = 64 << 10  # characters of a traceback or a text; the middle is cut out
NOTES_MAX: Final = 32  # notes of one exception
# Bytes of arguments and attributes in one tree, tensors not counted; the rest is left
# out: an error can always be sent, whatever it carries.
VALUES_BYTES_MAX: Final = 8 << 20
_PACKAGE: Final = str(Path(__file__).parents[2]) + os.sep
TYPES_MAX: Final = 256  # classes made per worker; programs raise some tens
# A generator or a coroutine would take the first two for its own end.
_ENDING: Final = (StopIteration, StopAsyncIteration, asyncio.CancelledError)

# The fields of RemoteError.  An exception with an attribute of such a name keeps it
# (the `worker` of OwnerLostError is the owner), and lists it under OWN.
_WHERE: Final = ("function", "to", "worker", "pid")
_REMOTE: Final = ("remote_type", "remote_message", "remote_traceback", "outcome")
OWN: Final = "_own_fields"


# --- describing ----------------------------------------------------------------------


def describe_exception(
    error: BaseException, codec: Codec, *, worker: str, pid: int
) -> dict[str, Any]:
    """Describe an exception for its way to the caller; encode the result.

    Args:
        codec: says which values can be sent; others, and values that are too large, are
            left out, and a note says so.
    """
    return _Describer(codec, worker, pid).describe(error, depth=0)


def undescribed(
    raised: str, problem: BaseException, *, worker: str, pid: int
) -> dict[str, Any]:
    """Describe an exception briefly, when `describe_exception` has failed."""
    why = type(problem).__name__[:100]
    text = f"a {raised[:100]} was raised, which cannot be sent: {why}"
    return {
        "type": "asyncrpc.errors:EncodeError",
        "message": text,
        "traceback": f"({text})\n",
        "args": [text],
        "state": {},
        "slots": {},
        "notes": [],
        "cause": None,
        "context": None,
        "suppress": True,
        "members": [],
        "worker": worker,
        "pid": pid,
    }


def without_code(tree: dict[str, Any]) -> dict[str, Any]:
    """Return a description in which classes are named, and do not travel by value."""
    bare = {key: part for key, part in tree.items() if key != "code"}
    for link in ("cause", "context"):
        bare[link] = tree[link] and without_code(tree[link])
    bare["members"] = [member and without_code(member) for member in tree["members"]]
    return bare


class _Describer:
    """Describes an exception and those linked to it, each once, within limits."""

    def __init__(self, codec: Codec, worker: str, pid: int) -> None:
        self._codec = codec
        self._where = {"worker": worker, "pid": pid}
        self._seen: set[int] = set()
        self._bytes_left = VALUES_BYTES_MAX

    def describe(self, error: BaseException, depth: int) -> dict[str, Any]:
        self._seen.add(id(error))
        args, state, slots, lost = self._parts(error)
        members: list[Any] = []
        if isinstance(error, BaseExceptionGroup):
            members = [self._link(member, depth) for member in error.exceptions]
            args = [error.message]
        tree = {
            "type": _type_name(type(error)),
            **self._code_of(type(error)),
            "message": text_of(error),
            "traceback": _traceback(error, chain=depth == 0),
            "args": args,
            "state": state,
            "slots": slots,
            "notes": _notes(error) + lost,
            "cause": self._link(error.__cause__, depth),
            "context": self._link(error.__context__, depth),
            "suppress": error.__suppress_context__,
            "members": members,
            **self._where,
        }
        if isinstance(error, RemoteError) and hasattr(error, "remote_type"):
            tree |= _relayed(error)
        return tree

    def _link(self, error: BaseException | None, depth: int) -> dict[str, Any] | None:
        if error is None or id(error) in self._seen:
            return None
        if depth >= DEPTH_MAX or len(self._seen) >= NODES_MAX:
            return None
        return self.describe(error, depth + 1)

    def _parts(
        self, error: BaseException
    ) -> tuple[list[Any], dict[str, Any], dict[str, Any], list[str]]:
        if isinstance(error, BaseExceptionGroup):
            args: list[Any] = []
        else:
            args = list(error.args)
        state = _state(error)
        slots = dict(slots_of(error))
        lost: list[str] = []
        for index, value in enumerate(args):
            if not self._has_room(value):
                args[index] = f"<{type(value).__qualname__}, which could not travel>"
                lost.append(f"args[{index}]")
        for values in (state, slots):
            for name in [key for key in values if not self._has_room(values[key])]:
                lost.append(name)
                del values[name]
        if lost:
            shown = _shortened(", ".join(lost))
            lost = [f"(could not travel with this exception: {shown})"]
        return args, state, slots, lost

    def _code_of(self, cls: type) -> dict[str, Any]:
        """Return the class itself, if it has no name at the caller."""
        cls = getattr(cls, "remote_class", cls)
        return {"code": cls} if self._codec.functions.travels_by_value(cls) else {}

    def _has_room(self, value: object) -> bool:
        """Return whether a value can be sent with the others; if so, count it."""
        nbytes = self._codec.encoded_bytes(value)
        if nbytes is None or nbytes > self._bytes_left:
            return False
        self._bytes_left -= nbytes
        return True


def _state(error: BaseException) -> dict[str, Any]:
    """Return the attributes that are the exception's own, not its carrier's."""
    carried: set[str] = {"__notes__", OWN}
    if isinstance(error, CallError):
        carried.update(_WHERE, _REMOTE)
        carried.difference_update(error.__dict__.get(OWN, ()))
    return {
        name: value
        for name, value in error.__dict__.items()
        if isinstance(name, str) and name not in carried
    }


def _relayed(error: RemoteError) -> dict[str, Any]:
    """Return the fields that say where a relayed exception was first raised."""
    fields = error.__dict__
    original = getattr(type(error), "remote_class", None)
    named = fields["remote_type"] if original is None else _type_name(original)
    return {
        "type": named,
        "message": fields["remote_message"],
        "worker": fields["worker"],
        "pid": fields["pid"],
        "relayed": fields["remote_traceback"],
    }


def _type_name(cls: type) -> str:
    return _shortened(f"{cls.__module__}:{cls.__qualname__}")


def text_of(error: BaseException) -> str:
    """Return the text of an exception, shortened, even if its `__str__` raises."""
    try:
        return _shortened(str(error))
    except BaseException as problem:  # noqa: BLE001 - the user's own __str__
        return f"<its text could not be read: {type(problem).__name__}>"


def words_of(error: BaseException) -> str:
    """Return the class and text of an error of a value's own code, or of the system."""
    kind, text = type(error), text_of(error)
    try:
        cure = shortage_of(error)
    except BaseException:  # noqa: BLE001 - the user's own attributes
        cure = ""
    return f"{kind.__name__}: {'; '.join(filter(None, (text, cure)))}"


def _notes(error: BaseException) -> list[str]:
    notes = getattr(error, "__notes__", [])
    if not isinstance(notes, (list, tuple)):
        return []
    texts = [note for note in notes[:NOTES_MAX] if isinstance(note, str)]
    if len(notes) > NOTES_MAX:
        texts.append(f"({len(notes) - NOTES_MAX} more notes were left out)")
    return [_shortened(note) for note in texts]


def _traceback(error: BaseException, *, chain: bool) -> str:
    try:
        if type(error) is OverloadedError:
            # An overloaded worker has no time: formatting frames is two thirds of the
            # cost of a refusal, and the line that refused tells nothing.
            return f"{type(error).__qualname__}: {text_of(error)}\n"
        shown = traceback.TracebackException.from_exception(error)
        _fold(shown)
        # A relayed exception's notes hold the tracebacks of earlier hops.  They are
        # sent as notes: repeated here they would double with every hop.
        if isinstance(error, RemoteError):
            shown.__notes__ = None
        return _shortened("".join(shown.format(chain=chain)))
    except BaseException as problem:  # noqa: BLE001 - the user's own __str__
        return f"<its traceback could not be formatted: {type(problem).__name__}>\n"


def _fold(shown: traceback.TracebackException) -> None:
    """Leave out the frames of this package that have called the program's function.

    An error that no other code has raised keeps all.
    """
    unfolded = [shown]  # not by recursion: a chain may be long
    while unfolded:
        error = unfolded.pop()
        is_own = [frame.filename.startswith(_PACKAGE) for frame in error.stack]
        if False in is_own:
            del error.stack[: is_own.index(False)]
        linked = (error.__cause__, error.__context__, *(error.exceptions or ()))
        unfolded += filter(None, linked)


def _shortened(text: str) -> str:
    if len(text) <= TEXT_MAX:
        return text
    half = TEXT_MAX // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters ...\n{text[-half:]}"


# --- rebuilding ----------------------------------------------------------------------


def rebuild_exception(
    tree: Any, functions: FunctionTable, *, function: str, to: str
) -> RemoteError:
    """Make the exception that a worker described.

    Args:
        functions: finds the exception's class; under STRICT, only among builtins,
            asyncrpc's own errors and classes that are exposed or allowed.
    """
    try:
        error = _Rebuilder(functions, function, to).rebuild(tree, depth=0)
        text = tree["traceback"].rstrip("\n")
        error.add_note(f"--- on worker {to!r} (pid {tree['pid']}) ---\n{text}")
    except DecodeError:
        raise
    except Exception as problem:
        raise DecodeError(
            f"{to!r} sent a malformed description of an exception: {problem!r:.200}",
            function=function,
            to=to,
            outcome=Outcome.EXECUTED,
        ) from problem
    return error


class _Rebuilder:
    """Rebuilds an exception and those linked to it."""

    def __init__(self, functions: FunctionTable, function: str, to: str) -> None:
        self._functions = functions
        self._function = function
        self._to = to

    def rebuild(self, tree: dict[str, Any], depth: int) -> RemoteError:
        if depth > DEPTH_MAX:
            raise DecodeError(f"a chain of more than {DEPTH_MAX} exceptions arrived")
        error = self._typed(tree, depth) or self._plain(tree)
        for note in tree["notes"]:
            error.add_note(note)
        for link, attribute in (("cause", "__cause__"), ("context", "__context__")):
            if tree[link] is not None:
                setattr(error, attribute, self.rebuild(tree[link], depth + 1))
        error.__suppress_context__ = tree["suppress"] is True
        self._fill(error, tree)
        return error

    def _typed(self, tree: dict[str, Any], depth: int) -> RemoteError | None:
        cls = _usable(tree.get("code")) or _find_class(tree["type"], self._functions)
        if cls is None:
            return None
        combined_class = _combined_class(cls, self._functions)
        if combined_class is None:
            return None
        args = list(tree["args"])
        if issubclass(cls, BaseExceptionGroup):
            members = [
                self.rebuild(member, depth + 1) for member in tree["members"] if member
            ]
            if not members:
                return None
            args = [args[0], members]
        try:
            error = assemble(combined_class, [args, tree["state"], tree["slots"]])
        except Exception:  # noqa: BLE001 - the class's own code
            return None
        return error if isinstance(error, RemoteError) else None

    def _plain(self, tree: dict[str, Any]) -> RemoteError:
        name = tree["type"].replace(":", ".").removeprefix("builtins.")
        return RemoteError(f"{name}: {tree['message']}")

    def _fill(self, error: RemoteError, tree: dict[str, Any]) -> None:
        relayed = tree.get("relayed")
        where = {
            "function": self._function,
            "to": self._to,
            "worker": tree["worker"],
            "pid": tree["pid"],
        }
        own = [name for name in _WHERE if name in tree["state"]]
        error.__dict__.update(where | {name: tree["state"][name] for name in own})
        if own:
            error.__dict__[OWN] = own
        error.outcome = Outcome.EXECUTED
        error.remote_type = tree["type"].replace(":", ".")
        error.remote_message = tree["message"]
        error.remote_traceback = tree["traceback"] if relayed is None else relayed


def _find_class(name: str, functions: FunctionTable) -> type[BaseException] | None:
    """Return the class of a remote exception, if it may be raised here."""
    try:
        cls = functions.resolve_error(name)
    except (DecodeError, RejectedError):
        return None
    return _usable(cls)


def _usable(cls: object) -> type[BaseException] | None:
    """Return a class if its exceptions inform the caller, and do not end it."""
    if cls is BaseExceptionGroup:
        return cls
    if not isinstance(cls, type) or issubclass(cls, _ENDING):
        return None
    return cls if issubclass(cls, (Exception, BaseExceptionGroup)) else None


def _combined_class(
    cls: type[BaseException], functions: FunctionTable
) -> type[BaseException] | None:
    """Return the class that is both `RemoteError` and `cls`, made once per worker."""
    if issubclass(cls, RemoteError):
        return cls
    known = functions.error_types.get(cls)
    if known is None:
        try:
            known = combine(cls)
        except Exception:  # noqa: BLE001 - layouts conflict, or a metaclass refuses
            return None
        if len(functions.error_types) >= TYPES_MAX:
            functions.error_types = {}
        functions.error_types[cls] = known
    return known


def combine(cls: type[BaseException]) -> type[BaseException]:
    """Make the class that is both `RemoteError` and `cls`."""
    body = {
        "__module__": RemoteError.__module__,
        "__qualname__": f"RemoteError[{cls.__qualname__}]",
        "__doc__": f"A remote {cls.__qualname__}.",
        "__str__": _remote_text,
        "__reduce__": _reduce,
        "remote_class": cls,
    }
    bases: tuple[type, ...] = (RemoteError, cls)
    if issubclass(RemoteError, cls):  # CallError, Exception
        bases = (RemoteError,)
    elif issubclass(cls, CallError):  # its own fields and properties come first
        bases = (cls, RemoteError)
    kind: type[BaseException] = types.new_class(
        cls.__name__, bases, exec_body=lambda namespace: namespace.update(body)
    )
    return kind


def _remote_text(error: RemoteError) -> str:
    return error.remote_message


def _reduce(error: RemoteError) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    links = [error.__cause__, error.__context__, error.__suppress_context__]
    original: Any = type(error).remote_class  # type: ignore[attr-defined]
    return restore, (original, dismantle(error), links)


def restore(
    cls: type[BaseException], parts: list[Any], links: list[Any]
) -> BaseException:
    """Unpickle an exception that is both `RemoteError` and `cls`."""
    error = assemble(combine(cls), parts)
    error.__cause__, error.__context__, error.__suppress_context__ = links
    return error
