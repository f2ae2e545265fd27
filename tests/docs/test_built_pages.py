"""The pages that `make docs` builds: one of each public module, and the machines."""

from __future__ import annotations

import importlib
import re
import types
from pathlib import Path

import pytest

from asyncrpc import LocalRendezvous, Worker
from tests.architecture.public import MODULES
from tests.architecture.test_worker_members import members_of
from tests.docs.links import broken_links
from tests.property.machines import drawing
from tests.property.machines.catalog import CATALOG


def test_each_public_module_has_a_page(api: Path) -> None:
    assert {page.stem for page in api.iterdir()} == set(MODULES)


@pytest.mark.parametrize("module", MODULES)
def test_links_of_built_pages_resolve(api: Path, module: str) -> None:
    assert list(broken_links(api / f"{module}.md")) == []


@pytest.mark.parametrize("module", MODULES)
def test_module_page_has_every_public_name(api: Path, module: str) -> None:
    page = (api / f"{module}.md").read_text("utf-8")
    shown = set(re.findall(rf"^## {module}\.(\w+)$", page, re.MULTILINE))
    shown |= set(re.findall(r"\[`(\w+)`\]\(asyncrpc", page))
    public = importlib.import_module(module)
    is_module = types.ModuleType
    names = {n for n in public.__all__ if not isinstance(getattr(public, n), is_module)}
    assert shown == names


def attributes_and_methods(page: str, name: str) -> set[str]:
    """Return the members and attributes that a page describes of a class."""
    _, _, after = page.partition(f"\n## {name}\n")
    entry = re.split(r"\n## ", after)[0]
    about, *_ = entry.partition("\n### ")
    _, _, attributes = about.partition("**Attributes**")
    listed = attributes.lstrip().partition("\n\n")[0]
    return {
        *re.findall(rf"^### {name.rpartition('.')[2]}\.(\w+)$", entry, re.MULTILINE),
        *re.findall(r"^- `(\w+)`:", listed, re.MULTILINE),
    }


@pytest.fixture
def worker() -> Worker:
    """Some members are attributes of an object, not of its class."""
    return Worker("a", rendezvous=LocalRendezvous(1))


def test_worker_page_has_every_public_member(api: Path, worker: Worker) -> None:
    page = (api / "asyncrpc.md").read_text("utf-8")
    described = attributes_and_methods(page, "asyncrpc.Worker")
    assert set(members_of(worker)) - described == set()
    # An argument of `Worker` is no member, nor is a method of another class.
    assert not {"network", "call"} & described


def test_every_machine_is_drawn(tmp_path: Path) -> None:
    page = tmp_path / "machines.md"
    page.write_text(drawing.page(tmp_path), encoding="utf-8")
    assert list(broken_links(page)) == []
    headings = re.findall(r"^## (.*)$", page.read_text("utf-8"), re.MULTILINE)
    assert headings == [machine.name for machine in CATALOG]
