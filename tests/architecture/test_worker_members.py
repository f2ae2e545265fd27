"""What a program sees of a worker: few names, and the API page has each of them."""

from __future__ import annotations

import re
from collections.abc import Iterable

import pytest

from asyncrpc import LocalRendezvous, Worker
from tests.architecture.sources import REPOSITORY

MEMBERS_MAX = 25

API = REPOSITORY / "docs" / "reference" / "api.md"


def public_of(one: object) -> list[str]:
    return [name for name in dir(one) if not name.startswith("_")]


def described(name: str) -> set[str]:
    """Return the members and attributes that the API page describes of a class."""
    _, _, after = API.read_text(encoding="utf-8").partition(f"\n### {name}\n")
    entry = re.split(r"\n##?#? ", after)[0]
    about, *_ = entry.partition("\n#### ")
    _, _, attributes = about.partition("**Attributes**")
    own = name.rpartition(".")[2]
    listed = attributes.lstrip().partition("\n\n")[0]
    return {
        *re.findall(rf"^#### {own}\.(\w+)$", entry, re.MULTILINE),
        *re.findall(r"^- `(\w+)`:", listed, re.MULTILINE),
    }


@pytest.fixture
def members() -> Iterable[str]:
    """Of an object: some are no attributes of the class."""
    return public_of(Worker("a", rendezvous=LocalRendezvous(1)))


def test_a_worker_has_few_public_members(members: list[str]) -> None:
    assert len(members) <= MEMBERS_MAX, members


def test_the_api_page_describes_every_public_member(members: list[str]) -> None:
    assert set(members) - described("asyncrpc.Worker") == set()


def test_members_are_read_from_the_page() -> None:
    """An argument of `Worker` is no member, nor is a method of another class."""
    found = described("asyncrpc.Worker")
    assert {"parts", "peer", "shutdown", "rrefs"} <= found
    assert not {"network", "call"} & found
