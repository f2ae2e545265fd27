"""What a user may import is what is written down: a change of it is a decision."""

from __future__ import annotations

import importlib
import types
from pathlib import Path

import pytest

import asyncrpc

PINNED = Path(__file__).with_name("public_names.txt")
PINNED_NAMES = [
    line
    for line in PINNED.read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
]


def test_the_public_names_are_those_that_are_pinned() -> None:
    """Where they differ on purpose, change public_names.txt and CHANGELOG.md, too."""
    assert sorted(asyncrpc.__all__) == sorted(PINNED_NAMES)


def test_the_pinned_names_are_in_order_and_written_once() -> None:
    assert sorted(set(PINNED_NAMES)) == PINNED_NAMES


@pytest.mark.parametrize("name", PINNED_NAMES)
def test_every_public_name_is_there(name: str) -> None:
    assert hasattr(asyncrpc, name)


@pytest.mark.parametrize("name", PINNED_NAMES)
def test_a_public_module_pins_its_own_names(name: str) -> None:
    public = getattr(asyncrpc, name)
    if isinstance(public, types.ModuleType):
        module = importlib.import_module(public.__name__)
        assert module.__all__, f"{public.__name__} has no __all__"
        assert [one for one in module.__all__ if not hasattr(module, one)] == []
