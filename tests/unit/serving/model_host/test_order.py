"""The function that makes a model: named, found, and refused if it cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncrpc.core.options import Options
from asyncrpc.errors import NotStartedError, UsageError
from asyncrpc.serving import ModelHost, ModelHostStatus
from asyncrpc.serving.model_host.order import (
    HostOrder,
    file_of,
    main_for,
    name_of_function,
    resolve,
)


def make() -> int:
    return 7


def order_for(function: str) -> HostOrder:
    return HostOrder(
        name="model",
        function=function,
        version="",
        generation="g",
        linger_s=0.0,
        folder="/nowhere",
        options=Options(),
        main={},
        secret=b"hidden",
    )


def test_function_is_found_by_its_name() -> None:
    name = name_of_function(make)
    assert name == f"{__name__}:make"
    assert name_of_function(name) == name
    assert resolve(order_for(name)) is make
    assert file_of(name) == __file__
    assert main_for(name) == {}


@pytest.mark.parametrize(
    "wrong", ["make", "a:", ":b", "a b:c", "a..b:c", 7, None, b"a:b"]
)
def test_malformed_function_name_is_refused(wrong: Any) -> None:
    with pytest.raises(UsageError, match="make_model must be a function at the top"):
        name_of_function(wrong)


def test_function_without_a_name_is_refused() -> None:
    with pytest.raises(UsageError, match="cannot be imported by another process"):
        name_of_function(lambda: 7)


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        ("no_such_module_here:make", "there is no module 'no_such_module_here'"),
        ("asyncrpc.no_such:make", "there is no module 'asyncrpc.no_such'"),
        ("no_such_package.inner:make", "No module named 'no_such_package'"),
    ],
)
def test_missing_module_is_named(function: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        file_of(function)


def test_module_is_found_without_an_import() -> None:
    assert Path(file_of("this:make")).name == "this.py"


@pytest.mark.parametrize("name", ["absent", "PATTERN.x"])
def test_name_that_leads_nowhere_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=f"has no function '{name}'"):
        resolve(order_for(f"{__name__}:{name}"))


def test_secret_is_in_no_text() -> None:
    assert "hidden" not in repr(order_for("a:b"))


async def test_unentered_host_is_an_error() -> None:
    host = ModelHost(make)
    assert host.status == ModelHostStatus("seeking", "", 0, "")
    for use in (lambda: host.model, lambda: host.peer, lambda: host.worker):
        with pytest.raises(NotStartedError, match="async with serving"):
            use()
    with pytest.raises(NotStartedError, match="async with serving"):
        await host.wait_ready()
    for wrong in (-1, float("inf"), float("nan"), "1", True):
        with pytest.raises(UsageError, match="timeout_s must be a finite number"):
            await host.wait_ready(wrong)  # type: ignore[arg-type]
