"""Code that travels by value: functions and classes that peers cannot import by name.

Its name is made of its content, `#digest:qualname`.  A peer is sent the content once,
by `calls.code`; from then on the name is all that travels.

What a function closes over, its globals and its defaults belong to the content, as they
are when it is sent.  If one is another object at a later call, the content is made
anew.  Where one can change in place, as a list can, it is made anew for every call.
"""

from __future__ import annotations

import dis
import enum
import hashlib
import multiprocessing
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Self

import torch

from asyncrpc.core.serde.exceptions import words_of
from asyncrpc.core.serde.naming import ABSENT, find_name, imported_module, walk
from asyncrpc.errors import DecodeError, EncodeError, Outcome

MARK: Final = "#"  # begins the name; no module's name does
CONTENT_BYTES_MAX: Final = 64 << 20  # of one function; larger data is an argument
# Why a function without a name does not go to a peer; after its name.
NO_CODE: Final = (
    "has no name that the receiver could import, and policy strict, here or there, lets"
    " no function travel by value; define it in a module that both can import"
)
_DIGEST_BYTES: Final = 16
_CONSTANTS: Final = frozenset(
    {
        *(type(None), type(...), bool, int, float, complex, str, bytes, range),
        *(types.BuiltinFunctionType, types.GetSetDescriptorType, types.CodeType),
        *(types.MemberDescriptorType, torch.dtype, torch.device, torch.layout),
    }
)
_MAINS: Final = ("__main__", "__mp_main__")


class CodeName(str):
    """The name of a function or class that travels by value: `#digest:qualname`.

    Attributes:
        content: a pickle of it.
        main: the program whose main module has it under its qualname; empty: none has.
        simple: the function's name, without its module.
        head: of a request for it, for `calls.heads`; empty: it is not made yet.
    """

    __slots__ = ("content", "head", "main", "simple")

    content: bytes
    main: str
    simple: str
    head: bytes

    @classmethod
    def of(cls, content: bytes, qualname: str, main: str) -> Self:
        """Return the name of code."""
        name = cls(f"{_digest(content)}:{qualname}")
        name.content, name.main = content, main
        name.simple, name.head = qualname, b""
        return name

    @classmethod
    def received(cls, name: str, content: bytes, main: str) -> Self:
        """Return the name that a peer has given; DecodeError: it is another's."""
        if not name.startswith(f"{_digest(content)}:"):
            raise DecodeError(
                f"the code of {shown_name(name)} is not what its name says",
                outcome=Outcome.NOT_EXECUTED,
            )
        return cls.of(content, name.partition(":")[2], main)


def _digest(content: bytes) -> str:
    return MARK + hashlib.blake2b(content, digest_size=_DIGEST_BYTES).hexdigest()


def goes_by_value(value: object) -> bool:
    """Return whether this is of a kind that can travel by value."""
    return type(value) is types.FunctionType or isinstance(value, type)


def main_has_a_file() -> bool:
    """Return whether other processes could import the main module of this one.

    That of a child of multiprocessing is its parent's, or has no functions.
    """
    return bool(_main_path()) or multiprocessing.parent_process() is not None


def identity_of_main() -> str:
    """Return what tells the main module from others; empty: it has no file."""
    try:
        content = Path(_main_path()).read_bytes()
    except OSError:
        return ""
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def _main_path() -> str:
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    return path if isinstance(path, str) else ""


@dataclass(slots=True, eq=False)
class _Own:
    """Code of this process."""

    function: weakref.ref[Any]
    name: CodeName
    watch: _Watch


@dataclass(slots=True, eq=False)
class ReceivedCode:
    """Code of a peer.

    Attributes:
        holders: how many peers have sent it, and not taken it back.
        target: what `calls.targets` has found out about it.
        cached_in: tables that have it under a key, and lose it when it is let go.
    """

    function: Any
    name: CodeName
    holders: int = 0
    target: Any = None
    cached_in: list[tuple[dict[bytes, Any], bytes]] = field(default_factory=list)


class CodeTable:
    """The code that travels by value, of one worker.

    Attributes:
        main_travels: whether the functions of the main module travel by value, because
            peers run other programs, or this one cannot be imported.
        modules: names of modules with classes that have travelled.
        look_up: returns the code of a name that a peer has sent, None without one.
    """

    def __init__(self, *, main_travels: bool = False) -> None:
        self.main_travels = main_travels
        self.modules = set(_MAINS)
        self._own: dict[int, _Own] = {}  # by id
        self._own_names: dict[str, _Own] = {}
        self._received: dict[str, ReceivedCode] = {}
        self.look_up = self._received.get
        self._received_names: dict[int, CodeName] = {}  # by id of the function
        self._classes: weakref.WeakSet[type] = weakref.WeakSet()  # of peers

    @cached_property
    def main(self) -> str:
        """What tells the main module of this program from others; empty: nothing."""
        return identity_of_main()

    def let_main_travel(self) -> None:
        """Make contents anew, which name parts of the main module."""
        self.main_travels = True
        self._own.clear()

    # --- of this process -------------------------------------------------------------

    def known_name(self, function: object) -> CodeName | None:
        """Return the name of code that has travelled before, None for others."""
        own = self._own.get(id(function))
        if own is not None and own.function() is function:
            if own.watch.sees_no_change():
                return own.name
            return self.add(function)
        return self._received_names.get(id(function))

    def takes(self, function: Any) -> bool:
        """Return whether a function or class has no name that leads to it at peers."""
        if has_name(function, main_travels=self.main_travels):
            return False
        if is_here_alone(str(function.__module__)):
            self.modules.add(str(function.__module__))
        return True

    def add(self, function: Any) -> CodeName:
        """Return the name of a function or class, after making its content.

        EncodeError: something that belongs to it cannot be pickled.
        """
        content = self._content_of(function)
        if len(content) > CONTENT_BYTES_MAX:
            raise _refusal(
                function,
                f"it takes {len(content)} bytes with all that it refers to, more than"
                f" {CONTENT_BYTES_MAX}; pass large values as arguments",
            )
        main = self.main if is_of_main(function) else ""
        name = CodeName.of(content, function.__qualname__, main)
        before = self._own.get(id(function))
        if before is not None and before.name == name:
            return before.name
        watch = _Watch(function, main_travels=self.main_travels)
        key = id(function)
        own = _Own(weakref.ref(function), name, watch)
        weakref.finalize(function, self._forget, key, own).atexit = False
        self._own[key] = self._own_names[name] = own
        return name

    def _forget(self, key: int, own: _Own) -> None:
        if self._own.get(key) is own:
            del self._own[key]
        if self._own_names.get(own.name) is own:
            del self._own_names[own.name]

    def _content_of(self, function: Any) -> bytes:
        content = self._pickled(function)
        if isinstance(content, bytes):
            return content
        at, problem, where, seen = function, content, "", {id(function)}
        while (found := self._first_unpicklable(at, seen)) is not None:
            label, at, problem = found
            where = f"{label} of its {where}" if where else label
        where = f"{where}, a {_kind_of(at)}," if where else "it"
        raise _refusal(
            function,
            f"{where} cannot be pickled: {words_of(problem)}; pass it as an argument",
        ) from problem

    def _first_unpicklable(
        self, whole: Any, seen: set[int]
    ) -> tuple[str, Any, BaseException] | None:
        for label, part in _parts_of(whole):
            content = b"" if id(part) in seen else self._pickled(part)
            if not isinstance(content, bytes):
                seen.add(id(part))
                return label, part, content
        return None

    def _pickled(self, value: Any) -> bytes | BaseException:
        """Return the pickle of a part, or why there is none."""
        try:
            content: bytes = _pickles().dump(value, main_travels=self.main_travels)
        except KeyboardInterrupt:
            raise
        except BaseException as problem:  # noqa: BLE001  (the value's own code)
            return problem
        return content

    # --- of peers --------------------------------------------------------------------

    def load(self, name: CodeName) -> Any:
        """Return the function of a peer; in any thread.

        DecodeError: it cannot be made here.
        """
        received, own = self.look_up(name), self._own_names.get(name)
        function = None if own is None else own.function()
        if received is not None:
            function = received.function
        if function is None and name.main and name.main == self.main:
            function = in_main(name.partition(":")[2])
        if function is not None:
            return function
        try:
            return _pickles().load(name.content, self._classes)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise DecodeError(
                f"the code of {shown_name(name)} cannot be loaded on this worker:"
                f" {words_of(error)}",
                outcome=Outcome.NOT_EXECUTED,
            ) from error

    def hold(self, name: CodeName, function: Any) -> None:
        """Keep what `load` has returned, once more."""
        received = self._received.get(name)
        if received is None:
            received = self._received[name] = ReceivedCode(function, name)
            self._received_names.setdefault(id(function), name)
        received.holders += 1

    def let_go(self, name: str) -> None:
        """Let go of code that a peer has sent, once."""
        received = self._received.get(name)
        if received is None:
            return
        received.holders -= 1
        if not received.holders:
            del self._received[name]
            for cache, key in received.cached_in:
                cache.pop(key, None)
            if self._received_names.get(id(received.function)) == name:
                del self._received_names[id(received.function)]

    def received(self, name: str) -> ReceivedCode:
        """Return the code of a name that a peer has sent.

        DecodeError: no peer has sent it, or all have taken it back.
        """
        received = self.look_up(name)
        if received is None:
            raise DecodeError(
                f"the code of {shown_name(name)} is not on this worker; call it again",
                outcome=Outcome.NOT_EXECUTED,
            )
        return received


def has_name(function: Any, *, main_travels: bool) -> bool:
    """Return whether a name leads to a function or class at peers, too."""
    try:
        name = find_name(function)
    except EncodeError:
        return False
    return not main_travels or not is_here_alone(name.partition(":")[0])


def is_here_alone(module_name: str) -> bool:
    """Return whether a module cannot be imported by its name in other programs."""
    module = imported_module(module_name)
    spec, file = (getattr(module, name, None) for name in ("__spec__", "__file__"))
    return module_name in _MAINS or (spec is None and file is None)


def in_main(qualname: str) -> Any:
    """Return what the main module of this program has under a name; None: nothing."""
    main = imported_module("__main__")
    value = ABSENT if main is None else walk(main, qualname)[1]
    return value if goes_by_value(value) else None


def is_of_main(function: Any) -> bool:
    """Return whether the main module has a function or class under its name."""
    name = function.__qualname__
    is_named = function.__module__ in _MAINS and "<" not in name
    return is_named and in_main(name) is function


def _pickles() -> types.ModuleType:
    from asyncrpc.core.serde import code_pickle  # noqa: PLC0415  (few programs need it)

    return code_pickle


def shown_name(name: str) -> str:
    """Return the name of code for people."""
    return repr(name.partition(":")[2] or name)[:200]


def _refusal(function: Any, problem: str) -> EncodeError:
    return EncodeError(
        f"{function.__qualname__} cannot be sent by value: {problem}",
        outcome=Outcome.NOT_EXECUTED,
    )


def _kind_of(value: object) -> str:
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")


# --- what belongs to a function ------------------------------------------------------


def _parts_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what belongs to a function or class, each with a name for people."""
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    if isinstance(value, type):
        yield from ((f"attribute {x!r}", part) for x, part in _attributes_of(value))
    if type(value) is not types.FunctionType:
        return
    cells = [(name, _content(cell)) for name, cell in _cells(value)]
    look_up = value.__globals__.get
    names = [(name, look_up(name, ABSENT)) for name in _globals_of(value.__code__)]
    defaults = *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()
    labelled = [
        *((f"closure variable {name!r}", content) for name, content in cells),
        *((f"global {name!r}", content) for name, content in names),
        *(("default of an argument", content) for content in defaults),
        *((f"attribute {name!r}", content) for name, content in vars(value).items()),
    ]
    yield from (part for part in labelled if part[1] is not ABSENT)


def _cells(function: types.FunctionType) -> Iterator[tuple[str, types.CellType]]:
    return zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty: a function that refers to itself, say
        return ABSENT


def _globals_of(code: types.CodeType) -> dict[str, None]:
    """Return the names of the globals that code uses, with that of its inner code."""
    names = {
        step.argval: None
        for step in dis.get_instructions(code)
        if step.opname in {"LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"}
    }
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _globals_of(constant)
    return names


def _attributes_of(cls: type) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a class that its source has made."""
    for name, value in list(vars(cls).items()):
        is_code = isinstance(value, (types.FunctionType, staticmethod, classmethod))
        if is_code or not (name == "_abc_impl" or name[:2] == name[-2:] == "__"):
            yield name, value


class _Watch:
    """Sees whether a part of a function has become another object.

    It keeps no function or class alive.
    """

    __slots__ = (
        *("_classes", "_functions", "_globals"),
        *("_is_blind", "_main_travels", "_seen"),
    )

    def __init__(self, function: Any, *, main_travels: bool) -> None:
        self._globals: list[tuple[Callable[[str], Any], str, Any]] = []
        self._functions: list[tuple[weakref.ref[Any], Any, Any, list[Any]]] = []
        self._classes: list[tuple[weakref.ref[type], int, dict[str, Any]]] = []
        self._is_blind = False  # a part can change in place
        self._main_travels = main_travels
        self._seen: dict[int, Any] = {}
        self._take_parts(function)
        self._seen.clear()

    def sees_no_change(self) -> bool:
        """Return whether all parts are what they were."""
        if self._is_blind:
            return False
        for get, name, held in self._globals:
            if not _is(get(name), held):
                return False
        for known, code, defaults, contents in self._functions:
            function = known()
            if function is None or function.__code__ is not code:
                return False
            if function.__defaults__ is not defaults:
                return False
            for cell, held in zip(function.__closure__ or (), contents, strict=True):
                if not _is(_content(cell), held):
                    return False
        return all(_has_parts(*noted) for noted in self._classes)

    def _take(self, value: Any) -> None:
        kind = type(value)
        if kind in _CONSTANTS or id(value) in self._seen or self._is_blind:
            return
        self._seen[id(value)] = value
        if kind is tuple or kind is frozenset:
            for part in value:
                self._take(part)
        elif kind in {staticmethod, classmethod}:
            self._take(value.__func__)
        elif kind is property:
            for part in (value.fget, value.fset, value.fdel):
                self._take(part)
        elif goes_by_value(value):
            if not has_name(value, main_travels=self._main_travels):
                self._take_parts(value)
        elif not isinstance(value, (types.ModuleType, enum.Enum)):
            self._is_blind = True

    def _take_parts(self, value: Any) -> None:
        self._seen[id(value)] = value
        if isinstance(value, type):
            self._take_class(value)
            return
        look_up = value.__globals__.get
        for name in _globals_of(value.__code__):
            part = look_up(name)
            self._globals.append((look_up, name, _held(part)))
            self._take(part)
        contents = [_content(cell) for _, cell in _cells(value)]
        held = [_held(content) for content in contents]
        defaults = value.__defaults__
        self._functions.append((weakref.ref(value), value.__code__, defaults, held))
        for part in contents:
            if part is not ABSENT:
                self._take(part)
        more = *(value.__kwdefaults__ or {}).values(), *vars(value).values()
        for part in (defaults, *more):
            self._take(part)

    def _take_class(self, value: type) -> None:
        size = len(vars(value))
        parts = dict(_attributes_of(value))
        held = {name: _held(part) for name, part in parts.items()}
        self._classes.append((weakref.ref(value), size, held))
        for part in (*parts.values(), *value.__bases__):
            self._take(part)


def _has_parts(known: weakref.ref[type], size: int, parts: dict[str, Any]) -> bool:
    now = {} if (kind := known()) is None else vars(kind)
    return len(now) == size and all(
        _is(now.get(name), held) for name, held in parts.items()
    )


def _held(value: Any) -> Any:
    return weakref.ref(value) if goes_by_value(value) else value


def _is(value: Any, held: Any) -> bool:
    return (held() if type(held) is weakref.ref else held) is value
