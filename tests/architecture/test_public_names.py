"""The names that a user may import are those of `__all__`, and tests use each of them.

So a name that goes or changes fails a test or a type check without a second list.
"""

from __future__ import annotations

import ast
import functools
import importlib
import re
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

import asyncrpc
from tests.architecture.public import FURTHER_MODULES, MODULES
from tests.architecture.sources import (
    REPOSITORY,
    TESTS,
    name_of,
    parse,
    python_files,
)
from tests.integration.misuse.surface import surface

PUBLIC_MODULES = (*MODULES, *FURTHER_MODULES)
PUBLIC_NAMES = [
    (module, name)
    for module in PUBLIC_MODULES
    for name in importlib.import_module(module).__all__
]
# The names of `asyncrpc.compat` are torch's, whose suites use them.  A page names the
# errors, and tests/docs/test_reference.py compares.
OWN_NAMES = [
    f"{module}.{name}"
    for module, name in PUBLIC_NAMES
    if not module.startswith(("asyncrpc.compat", "asyncrpc.errors"))
]

# An import that is a line of its own, or all of a code span.
IMPORT = re.compile(
    r"^[ \t]*import (?P<module>asyncrpc[\w.]*)"
    r"|`import (?P<span>asyncrpc[\w.]*)`"
    r"|^[ \t]*from (?P<source>asyncrpc[\w.]*) import (?P<names>\([^)]*\)|[^\n#]*)",
    re.MULTILINE,
)


def pages() -> list[Path]:
    """Return the files that show users what to import."""
    paths = [REPOSITORY / "README.md"]
    paths += (REPOSITORY / "docs").rglob("*.md")
    paths += (REPOSITORY / "examples").rglob("*.md")
    paths += (REPOSITORY / "examples").rglob("*.py")
    return sorted(paths)


def is_module(name: str) -> bool:
    path = REPOSITORY.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def modules_imported_by(text: str) -> Iterator[str]:
    """Yield the modules of this package that a page or a program imports."""
    for match in IMPORT.finditer(text):
        if match["source"] is None:
            yield match["module"] or match["span"]
            continue
        yield match["source"]
        for name in re.findall(r"\w+", match["names"]):
            module = f"{match['source']}.{name}"
            if is_module(module):
                yield module


def literal_names(module: str) -> list[str]:
    """Return `__all__` of a module as its source has it.

    Raises:
        ValueError: it is computed.
    """
    tree = parse(Path(importlib.import_module(module).__file__ or ""))
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    raise ValueError(f"{module} has no __all__")


@functools.cache
def names_used() -> set[str]:
    """Return what tests and examples import, use in full, or list as misused."""
    names = {f"asyncrpc.{name}" for name in surface()}
    for path in python_files(TESTS, REPOSITORY / "examples"):
        names |= set(uses_of_imports(parse(path)))
    return names


def uses_of_imports(tree: ast.Module) -> Iterator[str]:
    """Yield each name of this package that is imported, or used below an import."""
    imported: dict[str, str] = {}
    for node in ast.walk(tree):
        match node:
            case ast.Import(names):
                roots = [alias for alias in names if not alias.asname]
                imported |= dict.fromkeys((a.name.split(".")[0] for a in roots), "")
                imported |= {a.asname: a.name for a in names if a.asname}
            case ast.ImportFrom(module=str(module), names=names, level=0):
                imported |= {a.asname or a.name: f"{module}.{a.name}" for a in names}
                yield from (f"{module}.{alias.name}" for alias in names)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            root, _, rest = ast.unparse(node).partition(".")
            if root in imported:
                yield f"{imported[root] or root}.{rest}"


@pytest.mark.parametrize("module", PUBLIC_MODULES)
def test_public_names_are_a_literal_list(module: str) -> None:
    names = literal_names(module)
    assert names == list(importlib.import_module(module).__all__)
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(("module", "name"), PUBLIC_NAMES)
def test_every_public_name_exists(module: str, name: str) -> None:
    assert hasattr(importlib.import_module(module), name)


def test_every_public_name_is_used_from_its_public_module() -> None:
    """In a test or an example, so that nobody renames it without a failure."""
    assert set(OWN_NAMES) - names_used() == set()


def test_uses_are_found_behind_every_form_of_import() -> None:
    tree = ast.parse(
        "import asyncrpc\nimport asyncrpc.trace as t\n"
        "from asyncrpc import nn as n, run\n"
        "asyncrpc.ddp.Join; t.OK; n.Pipeline; other.name\n"
    )
    assert set(uses_of_imports(tree)) >= {
        "asyncrpc.run",
        "asyncrpc.ddp.Join",
        "asyncrpc.trace.OK",
        "asyncrpc.nn.Pipeline",
    }


def test_modules_that_the_package_exports_are_public() -> None:
    exported = (getattr(asyncrpc, name) for name in asyncrpc.__all__)
    modules = {each.__name__ for each in exported if isinstance(each, types.ModuleType)}
    assert modules <= set(MODULES)


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_page_imports_public_modules_only(page: Path) -> None:
    """Add a module to docs/reference/api.md."""
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
