"""Functions and classes without a name: their content, and when it is made anew."""

from __future__ import annotations

import dataclasses
import enum
import gc
import sys
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from asyncrpc.core.serde import FunctionTable, Policy, by_value
from asyncrpc.core.serde.by_value import CodeName, CodeTable
from asyncrpc.errors import DecodeError, EncodeError

SCALE = 2
LOCK = threading.Lock()


def travelled(table: CodeTable, function: Any, to: CodeTable | None = None) -> Any:
    """Return a function as it is at a peer, which keeps it."""
    name = table.add(function)
    peer = to or CodeTable()
    arrived = CodeName.received(str(name), name.content, name.main)
    loaded = peer.load(arrived)
    peer.hold(arrived, loaded)
    return loaded


def test_closure_defaults_and_globals_travel() -> None:
    step = 3

    def scaled(value: int, more: int = 10) -> int:
        return value * step * SCALE + more

    assert travelled(CodeTable(), scaled)(1) == 16


def test_recursive_functions_travel() -> None:
    def is_even(value: int) -> bool:
        return value == 0 or is_odd(value - 1)

    def is_odd(value: int) -> bool:
        return value != 0 and is_even(value - 1)

    assert travelled(CodeTable(), is_even)(10)


def test_unchanged_function_keeps_its_name() -> None:
    table, step = CodeTable(), 3

    def scaled(value: int) -> int:
        return value * step

    name = table.add(scaled)
    assert table.known_name(scaled) is name
    assert name.endswith("scaled")


@pytest.mark.parametrize("changes", ["closure", "global", "default", "code", "helper"])
def test_changed_function_gets_another_name(
    changes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, step = CodeTable(), 3

    def helper() -> int:
        return step

    def scaled(value: int = 1) -> int:
        return helper() * SCALE * value

    before = table.add(scaled)
    match changes:
        case "closure":
            step = 4
        case "global":
            monkeypatch.setitem(globals(), "SCALE", 5)
        case "default":
            scaled.__defaults__ = (7,)
        case "code":
            scaled.__code__ = (lambda value=1: helper() + value + SCALE).__code__
        case "helper":
            helper.__code__ = (lambda: step + 1).__code__
    expected = scaled()
    assert table.known_name(scaled) != before
    assert travelled(table, scaled)() == expected


def test_function_with_a_list_is_looked_at_in_every_call() -> None:
    table, history = CodeTable(), list[int]()

    def total() -> int:
        return sum(history)

    before = table.add(total)
    assert table.known_name(total) == before
    history.append(5)
    assert table.known_name(total) != before
    assert travelled(table, total)() == 5


def test_changed_class_gets_another_name() -> None:
    table = CodeTable()

    class Model:
        size = 1

        def grown(self) -> int:
            return self.size + 1

    peer = CodeTable()
    before = table.add(Model)
    assert table.known_name(Model) == before
    Model.size = 5
    after = table.known_name(Model)
    assert after is not None
    assert after != before
    assert travelled(table, Model, peer)().grown() == 6


@dataclasses.dataclass
class Point:
    x: int


def test_kinds_of_classes_travel() -> None:
    class Colour(enum.Enum):
        RED = 1

    @dataclasses.dataclass(frozen=True)
    class Pair:
        left: int
        right: int

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(2, 2)

    class WrongError(ValueError):
        def __init__(self, code: int) -> None:
            super().__init__(f"code {code}")

    for cls in (Colour, Pair, Net, WrongError):
        assert travelled(CodeTable(), cls).__name__ == cls.__name__


def test_code_of_a_module_without_a_file_travels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As that of a page of documentation, or of a debugger."""
    page = types.ModuleType("page_without_a_file")
    monkeypatch.setitem(sys.modules, page.__name__, page)

    class Model:
        pass

    def make() -> Any:
        return page.Model()

    values: tuple[Any, ...] = (Model, make)
    for value in values:
        value.__module__, value.__qualname__ = page.__name__, value.__name__
        setattr(page, value.__name__, value)
    table = CodeTable(main_travels=True)
    assert table.takes(make)
    assert table.takes(Model)
    assert not CodeTable().takes(make)
    assert not table.takes(pytest.raises)
    name = table.add(Model)
    monkeypatch.delitem(sys.modules, page.__name__)
    assert CodeTable().load(CodeName.received(str(name), name.content, "")) is Model


def test_class_comes_back_as_itself() -> None:
    class Model:
        def size(self) -> int:
            return 1

    table, peer = CodeTable(), CodeTable()

    def make() -> Model:
        return Model()

    copy = travelled(table, make, peer)()
    methods = dict(vars(Model))
    back = travelled(peer, type(copy), table)
    assert back is Model
    assert dict(vars(Model)) == methods


def test_received_function_keeps_its_name() -> None:
    table, peer = CodeTable(), CodeTable()

    def step() -> int:
        return 1

    name = table.add(step)
    assert peer.known_name(travelled(table, step, peer)) == name
    assert peer.received(name).function() == 1
    peer.let_go(name)
    with pytest.raises(DecodeError, match=r"'.*step' is not on this worker"):
        peer.received(name)


def test_function_is_not_kept_alive() -> None:
    table = CodeTable()

    def made() -> Callable[[], Any]:
        def again() -> Any:
            return again

        table.add(again)
        return again

    known = weakref.ref(made())
    gc.collect()
    assert known() is None
    assert not table._own  # noqa: SLF001
    assert not table._own_names  # noqa: SLF001


@pytest.mark.parametrize(
    ("part", "text"),
    [
        ("closure", "closure variable 'lock', a _thread.lock, cannot be pickled"),
        ("inner", "closure variable 'lock' of its closure variable 'inner', a _thr"),
        ("default", "default of an argument, a _thread.lock, cannot"),
        ("attribute", "attribute 'lock', a _thread.lock, cannot"),
        ("class", "attribute 'lock' of its closure variable 'Model', a _thread.lock"),
    ],
)
def test_error_names_what_cannot_travel(part: str, text: str) -> None:
    lock = threading.Lock()

    def inner() -> Any:
        return lock

    class Model:
        pass

    Model.lock = lock  # type: ignore[attr-defined]

    def bare() -> None: ...

    def with_default(held: Any = lock) -> Any:
        return held

    bare.lock = lock  # type: ignore[attr-defined]
    function: Any = {
        "closure": lambda: lock,
        "inner": lambda: inner(),  # noqa: PLW0108
        "default": with_default,
        "attribute": bare,
        "class": lambda: Model,
    }[part]
    with pytest.raises(EncodeError, match=text) as caught:
        CodeTable().add(function)
    assert "pass it as an argument" in str(caught.value)


def test_error_names_a_global() -> None:
    with pytest.raises(EncodeError, match=r"by value: global 'LOCK', a _thread.lock"):
        CodeTable().add(lambda: LOCK)


def test_names_are_made_anew_once_the_main_module_travels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)

    def step() -> int:
        return 1

    step.__module__, step.__qualname__ = "__main__", "step"
    vars(main)["step"] = step
    functions = FunctionTable(Policy.TRUSTED)
    assert functions.name_of(step) == "__main__:step"
    functions.let_main_travel()
    assert functions.name_of(step).startswith("#")


def test_large_content_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_value, "CONTENT_BYTES_MAX", 1000)
    rows = torch.ones(1000)
    with pytest.raises(EncodeError, match="pass large values as arguments"):
        CodeTable().add(lambda: rows)


def test_code_under_the_name_of_other_code_is_refused() -> None:
    first, second = CodeTable().add(lambda: 1), CodeTable().add(lambda: 2)
    with pytest.raises(DecodeError, match="is not what its name says"):
        CodeName.received(str(first), second.content, "")


@pytest.mark.parametrize("content", [b"", b"junk", b"\x80\x05."])
def test_content_that_is_no_pickle_is_refused(content: bytes) -> None:
    name = CodeName.of(content, "step", "")
    with pytest.raises(DecodeError, match="code of 'step' cannot be loaded"):
        CodeTable().load(name)


def test_main_module_of_the_same_program_is_found_by_name() -> None:
    table = CodeTable()
    main = by_value.identity_of_main()
    if main:  # the test runner has a file
        assert table.main == main
    name = CodeName.of(b"junk", "no_such_function", main)
    with pytest.raises(DecodeError):
        table.load(name)
