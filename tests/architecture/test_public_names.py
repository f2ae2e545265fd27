"""What a user may import is what is written down: a change of it is a decision."""

from __future__ import annotations

import importlib
import types
from pathlib import Path

import pytest

import asyncrpc
from tests.architecture.public import MODULES

PINNED = Path(__file__).with_name("public_names.txt")
PINNED_NAMES = [
    line
    for line in PINNED.read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
]


def pinned_of(module: str) -> list[str]:
    parts = (line.rpartition(".") for line in PINNED_NAMES)
    return [name for owner, _, name in parts if owner == module]


@pytest.mark.parametrize("module", MODULES)
def test_the_public_names_are_those_that_are_pinned(module: str) -> None:
    """Where they differ on purpose, change public_names.txt and CHANGELOG.md, too."""
    assert sorted(importlib.import_module(module).__all__) == pinned_of(module)


def test_pinned_names_belong_to_public_modules() -> None:
    assert {line.rpartition(".")[0] for line in PINNED_NAMES} == set(MODULES)


@pytest.mark.parametrize("name", PINNED_NAMES)
def test_every_public_name_is_there(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    assert hasattr(importlib.import_module(module), attribute)


def test_modules_that_the_package_exports_are_public() -> None:
    exported = (getattr(asyncrpc, name) for name in asyncrpc.__all__)
    modules = {one.__name__ for one in exported if isinstance(one, types.ModuleType)}
    assert modules <= set(MODULES)
