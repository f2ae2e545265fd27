"""The page on the architecture has a row for every package, and for every machine."""

from __future__ import annotations

import ast
import re

import pytest

from tests.architecture.sources import PACKAGE, REPOSITORY
from tests.architecture.test_parts import MODULES, tree_of
from tests.property.machines.catalog import CATALOG

PAGE = REPOSITORY / "docs" / "explanation" / "architecture.md"


def named_in_rows() -> set[str]:
    """Return what the first columns of the page's tables name."""
    rows = re.findall(r"^\| (`.*?) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`([\w.]+)`", row)}


def packages(under: str = "") -> list[str]:
    files = (PACKAGE / under).glob("*/__init__.py")
    return sorted(f"{under}.{file.parent.name}".lstrip(".") for file in files)


def has_table(module: str) -> bool:
    """Return whether a module defines TRANSITIONS."""
    for node in tree_of(module).body:
        match node:
            case ast.AnnAssign(target=ast.Name("TRANSITIONS")):
                return True
            case ast.Assign(targets=[ast.Name("TRANSITIONS")]):
                return True
    return False


MACHINES = [module for module in MODULES if has_table(module)]


FOLDERS = ("core", "parallel", "tools", "clusters")


@pytest.mark.parametrize(
    "package", [*packages(), *(name for under in FOLDERS for name in packages(under))]
)
def test_every_package_has_a_row(package: str) -> None:
    assert package in named_in_rows()


@pytest.mark.parametrize("module", MACHINES)
def test_every_machine_has_a_row(module: str) -> None:
    """Of its own, or one with the other machines of its package."""
    name = module.removeprefix("asyncrpc.")
    package = name.rpartition(".")[0]
    own = {name} | ({package} if package.endswith("machine") else set())
    assert own & named_in_rows()


def test_rows_name_existing_modules() -> None:
    names = {f"asyncrpc.{name}" for name in named_in_rows()}
    assert names - set(MODULES) == set()


def test_every_machine_with_a_table_is_in_the_catalog() -> None:
    assert {machine.source.__name__ for machine in CATALOG} == set(MACHINES)
