"""A name leads back to the very function; strict opens nothing that was not opened."""

import functools
import importlib
import math
import operator
import os
import sys
from collections.abc import Callable
from os import system
from typing import Any

import numpy as np
import pytest
import torch

from asyncrpc.core.serde import FunctionTable, Policy, describe_callable, expose
from asyncrpc.errors import DecodeError, EncodeError, Outcome, RejectedError, UsageError
from tests.unit.core.serde.loopback import named


def step(x: int) -> int:
    return x + 1


class Model:
    @staticmethod
    def build() -> str:
        return "built"

    @classmethod
    def load(cls) -> str:
        return cls.__name__

    def forward(self) -> int:
        return 1

    class Inner:
        pass


@expose
class Open:
    @classmethod
    def make(cls) -> str:
        return "made"

    def forward(self) -> int:
        return 1

    def _secret(self) -> int:
        return 2


class Derived(Open):
    def extra(self) -> int:
        return 3


@expose
def opened() -> str:
    return "open"


def _decorator(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return function(*args)

    return wrapper


def _plain(x: int) -> int:
    return x


wrapped = _decorator(_plain)

trusted = FunctionTable(Policy.TRUSTED)
HERE = step.__module__


@pytest.mark.parametrize(
    "function",
    [
        *(step, Model, Model.build, Model.load, Model.forward, Model.Inner, len),
        *(dict.fromkeys, str.upper, math.sqrt, operator.add, operator.itemgetter),
        *(np.add, np.linalg.norm, torch.add, torch.mm, torch.nn.Linear),
        *(torch.linalg.multi_dot, torch.special.expit, torch.fft.fft),
        *(torch.nn.functional.linear, torch.nn.functional.relu, torch.Tensor.add),
        *(torch.Tensor.backward, torch.Tensor),
    ],
    ids=named,
)
def test_name_resolves_to_the_same_object(function: Any) -> None:
    name = trusted.name_of(function)
    resolved = trusted.resolve(name)
    assert resolved is function or resolved == function
    assert trusted.name_of(function) == name  # from the cache, now
    assert describe_callable(trusted, function) == ("name", name)


def test_public_names_are_preferred() -> None:
    assert trusted.name_of(torch.add) == "torch:add"
    assert trusted.name_of(torch.nn.functional.linear) == "torch.nn.functional:linear"
    assert trusted.name_of(operator.add) == "operator:add"
    assert trusted.name_of(torch.Tensor.add) == "torch:Tensor.add"


def test_main_module_of_a_spawned_process_is_main(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "__mp_main__", sys.modules[HERE])
    monkeypatch.setattr(step, "__module__", "__mp_main__")
    assert FunctionTable(Policy.TRUSTED).name_of(step) == "__main__:step"


def _nested() -> Callable[..., Any]:
    def inner() -> None: ...

    return inner


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda: 0, "lambda.*module level"),
        (_nested(), "inside a function.*move it to module level"),
        (Model().forward, "bound to an instance"),
        ([].append, "bound to an instance"),
    ],
)
def test_function_without_name_is_refused_with_advice(function: Any, text: str) -> None:
    with pytest.raises(EncodeError, match=text):
        FunctionTable(Policy.STRICT).name_of(function)


def test_function_shadowed_under_its_name_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = _plain
    monkeypatch.setattr(sys.modules[HERE], "_plain", wrapped)
    with pytest.raises(EncodeError, match="decorator"):
        FunctionTable(Policy.STRICT).name_of(original)


@torch.jit.script
def compiled(rows: torch.Tensor) -> torch.Tensor:
    return rows + 1


def doubled(rows: torch.Tensor) -> torch.Tensor:
    return rows * 2


def tripled(rows: torch.Tensor) -> torch.Tensor:
    return rows * 3


quick_doubled = torch.jit.script(doubled)


@pytest.mark.parametrize("function", [compiled, quick_doubled])
def test_compiled_function_travels_by_its_name(function: Any) -> None:
    assert trusted.resolve(trusted.name_of(function)) is function


def test_compiled_function_of_the_main_module_travels_by_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tripled, "__module__", "__main__")
    function = torch.jit.script(tripled)
    monkeypatch.setattr(sys.modules["__main__"], "tripled", function, raising=False)
    assert trusted.name_of(function) == "__main__:tripled"


def test_compiled_function_without_a_name_is_refused() -> None:
    scripted = torch.jit.script(step)
    with pytest.raises(EncodeError, match=r"TorchScript function .* found as .*step"):
        trusted.name_of(scripted)


@pytest.mark.parametrize(
    "function", [functools.partial(len), Model().forward, [].append, torch.nn.ReLU()]
)
def test_stateful_callable_travels_as_a_value(function: Any) -> None:
    assert describe_callable(trusted, function) == ("value", function)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("no.such.module:f", "no.such.module"),
        (f"{HERE}:absent", "has no 'absent'"),
        (f"{HERE}:Model.absent", "has no 'Model.absent'"),
        (f"{HERE}:HERE", "not a function"),
        (f"{HERE}:os.system", "has no 'os.system'"),
        ("step", "a function's name must be"),
        (":", "a function's name must be"),
    ],
)
def test_unknown_name_is_refused_with_what_is_missing(name: str, text: str) -> None:
    with pytest.raises(DecodeError, match=text):
        trusted.resolve(name)


# --- strict --------------------------------------------------------------------------


def strict(*allow: str) -> FunctionTable:
    return FunctionTable(Policy.STRICT, allow)


@pytest.mark.parametrize(
    "name", ["opened", "Open", "Open.make", "Open.forward"], ids=str
)
def test_strict_table_finds_exposed_functions(name: str) -> None:
    assert callable(strict().resolve(f"{HERE}:{name}"))


@pytest.mark.parametrize(
    "name", ["step", "Model", "Open._secret", "Derived", "Derived.extra", "absent"]
)
def test_strict_table_refuses_other_names_without_revealing_them(name: str) -> None:
    with pytest.raises(RejectedError, match=r"expose.*Options\.allow") as caught:
        strict().resolve(f"{HERE}:{name}")
    assert caught.value.outcome is Outcome.NOT_EXECUTED


def test_strict_table_allows_names_by_pattern() -> None:
    table = strict(f"{HERE}:*")
    assert table.resolve(f"{HERE}:step") is step
    assert table.is_allowed(step)
    assert table.is_allowed_method(Model, "forward")
    assert not strict().is_allowed(step)
    assert not strict().is_allowed_method(Model, "forward")
    assert strict().is_allowed_method(Open, "forward")
    assert not strict().is_allowed_method(Open, "_secret")


@pytest.mark.parametrize(
    "name", ["system", "os.system", "sys.exit", "importlib.reload"]
)
def test_pattern_does_not_expose_imported_names(name: str) -> None:
    assert os.system is system
    assert importlib.reload is not None
    with pytest.raises(RejectedError):
        strict(f"{HERE}:*").resolve(f"{HERE}:{name}")


def test_strict_table_never_imports() -> None:
    assert "this" not in sys.modules
    with pytest.raises(RejectedError):
        strict("this:*").resolve("this:s")
    assert "this" not in sys.modules


def test_unmarkable_function_is_refused_with_advice() -> None:
    with pytest.raises(UsageError, match=r"Options\.allow"):
        expose(len)


def test_function_names_are_bounded() -> None:
    table = FunctionTable(Policy.TRUSTED)
    for _ in range(3):
        table.name_of(step)
    assert len(table._names) == 1  # noqa: SLF001
