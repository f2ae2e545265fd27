"""The names that a user may import are written down: to change them is a decision."""

from __future__ import annotations

import importlib
import re
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

import asyncrpc
from tests.architecture.public import FURTHER_MODULES, MODULES
from tests.architecture.sources import REPOSITORY, name_of

PUBLIC_MODULES = (*MODULES, *FURTHER_MODULES)
PINNED = Path(__file__).with_name("public_names.txt")
PINNED_NAMES = [
    line
    for line in PINNED.read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
]

# An import that is a line of its own, or all of a code span.
IMPORT = re.compile(
    r"^[ \t]*import (?P<module>asyncrpc[\w.]*)"
    r"|`import (?P<span>asyncrpc[\w.]*)`"
    r"|^[ \t]*from (?P<source>asyncrpc[\w.]*) import (?P<names>\([^)]*\)|[^\n#]*)",
    re.MULTILINE,
)


def pinned_of(module: str) -> list[str]:
    parts = (line.rpartition(".") for line in PINNED_NAMES)
    return [name for owner, _, name in parts if owner == module]


def pages() -> list[Path]:
    """Return the files that show users what to import."""
    found = [REPOSITORY / "README.md"]
    found += (REPOSITORY / "docs").rglob("*.md")
    found += (REPOSITORY / "examples").rglob("*.md")
    found += (REPOSITORY / "examples").rglob("*.py")
    return sorted(found)


def is_module(name: str) -> bool:
    path = REPOSITORY.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def modules_imported_by(text: str) -> Iterator[str]:
    """Yield the modules of this package that a page or a program imports."""
    for found in IMPORT.finditer(text):
        if found["source"] is None:
            yield found["module"] or found["span"]
            continue
        yield found["source"]
        for name in re.findall(r"\w+", found["names"]):
            module = f"{found['source']}.{name}"
            if is_module(module):
                yield module


@pytest.mark.parametrize("module", PUBLIC_MODULES)
def test_the_public_names_are_those_that_are_pinned(module: str) -> None:
    """Where they differ on purpose, also change public_names.txt and CHANGELOG.md."""
    assert sorted(importlib.import_module(module).__all__) == pinned_of(module)


def test_pinned_names_belong_to_public_modules() -> None:
    owners = {line.rpartition(".")[0] for line in PINNED_NAMES}
    assert owners == set(PUBLIC_MODULES)


@pytest.mark.parametrize("name", PINNED_NAMES)
def test_every_public_name_exists(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    assert hasattr(importlib.import_module(module), attribute)


def test_modules_that_the_package_exports_are_public() -> None:
    exported = (getattr(asyncrpc, name) for name in asyncrpc.__all__)
    modules = {one.__name__ for one in exported if isinstance(one, types.ModuleType)}
    assert modules <= set(MODULES)


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_a_page_imports_public_modules_only(page: Path) -> None:
    """Add a module to `FURTHER_MODULES` with its pins."""
    imported = set(modules_imported_by(page.read_text(encoding="utf-8")))
    assert imported <= set(PUBLIC_MODULES)


def test_imports_are_found_in_every_form() -> None:
    text = """
import asyncrpc.trace
    from asyncrpc import devices, run
from asyncrpc import (
    errors,
    Worker,
)
`import asyncrpc.compat.rpc` in a sentence; import asyncrpc.no
"""
    assert sorted(modules_imported_by(text)) == [
        "asyncrpc",
        "asyncrpc",
        "asyncrpc.compat.rpc",
        "asyncrpc.devices",
        "asyncrpc.errors",
        "asyncrpc.trace",
    ]
