"""Every error has one home, `asyncrpc.errors`; those that programs catch have a second.

The second is the package itself: few enough to be known by heart.
"""

from __future__ import annotations

import inspect
from typing import Any

import asyncrpc
from asyncrpc import errors
from tests.architecture.public import MODULES, exported
from tests.architecture.test_parts import all_classes, lineage

# What a program catches, and what it asks before it tries again.
CAUGHT = {
    "AsyncRpcError",
    "CallError",
    "DeadlineExceededError",
    "Outcome",
    "OwnerLostError",
    "RejectedError",
    "RemoteError",
    "UsageError",
    "WorkerLostError",
}
# The kit for tests: they stand for a test that has failed, and no worker raises them.
OF_TESTS = {"asyncrpc.testing.StillPendingError"}


def is_error(public: Any) -> bool:
    return inspect.isclass(public) and issubclass(public, BaseException)


def test_list_of_errors_is_complete() -> None:
    defined = {
        name
        for name, public in vars(errors).items()
        if inspect.isclass(public) and public.__module__ == errors.__name__
    }
    assert set(errors.__all__) == defined


def test_list_of_errors_is_in_order() -> None:
    assert errors.__all__ == sorted(set(errors.__all__))


def test_errors_are_defined_in_one_file() -> None:
    root = f"{errors.__name__}.AsyncRpcError"
    ours = {
        definition.name
        for definition in all_classes().values()
        if root in {each.name for each in lineage(definition)}
    }
    assert root in ours
    assert {name for name in ours if not name.startswith(errors.__name__)} == set()


def test_package_exports_the_errors_that_programs_catch() -> None:
    assert set(asyncrpc.__all__) & set(errors.__all__) == CAUGHT
    assert all(getattr(asyncrpc, name) is getattr(errors, name) for name in CAUGHT)


def test_other_modules_export_no_error() -> None:
    assert "asyncrpc.errors" in MODULES
    homes = {"asyncrpc", "asyncrpc.errors"}
    elsewhere = {
        name
        for name, public in exported()
        if is_error(public) and name.rpartition(".")[0] not in homes
    }
    assert elsewhere == OF_TESTS
