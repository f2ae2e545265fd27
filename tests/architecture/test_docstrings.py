"""What is exported is described in full; every module says what it decides."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.architecture.public import described, public_places
from tests.architecture.sources import (
    PACKAGE,
    module_of,
    name_of,
    parse,
    python_files,
)

WORDS_MIN = 4  # fewer say nothing: "Package.", "The module."
# In the order of the house rules; a section that is empty is left out.
SECTIONS = [
    "Args:",
    "Returns:",
    "Yields:",
    "Raises:",
    "Cancellation:",
    "Thread safety:",
    "Attributes:",
    "Example:",
    "Source:",
]

# What only callers from outside need; `Args` may say what special values mean anywhere.
FOR_USERS = {"Returns:", "Yields:", "Raises:", "Cancellation:", "Thread safety:"}


OBJECTS = described()
PUBLIC_PLACES = public_places()


def class_docstring(method: str) -> str:
    """Return the docstring of the class of a public method; empty for a function."""
    owner = dict(OBJECTS).get(method.rpartition(".")[0])
    return (inspect.getdoc(owner) or "") if inspect.isclass(owner) else ""


COROUTINES = [
    (name, public) for name, public in OBJECTS if inspect.iscoroutinefunction(public)
]


@pytest.mark.parametrize("path", python_files(PACKAGE), ids=name_of)
def test_module_docstring_describes_its_subject(path: Path) -> None:
    docstring = ast.get_docstring(parse(path)) or ""
    assert len(docstring.split()) >= WORDS_MIN, docstring


@pytest.mark.parametrize(("name", "public"), OBJECTS, ids=[name for name, _ in OBJECTS])
def test_public_objects_have_docstrings(name: str, public: Any) -> None:
    # A class inherits its base's by `getdoc`: its own is asked for.
    assert vars(public).get("__doc__") if inspect.isclass(public) else public.__doc__


@pytest.mark.parametrize(
    ("name", "coroutine"), COROUTINES, ids=[name for name, _ in COROUTINES]
)
def test_public_coroutine_documents_errors_and_cancellation(
    name: str, coroutine: Any
) -> None:
    """Itself, or its class for all of its coroutines."""
    docstring = (inspect.getdoc(coroutine) or "") + class_docstring(name)
    missing = [
        section for section in ("Raises:", "Cancellation:") if section not in docstring
    ]
    assert missing == [], name


def undescribed(public: Any) -> Iterator[str]:
    """Yield the parameters that a list of arguments leaves out."""
    function = vars(public).get("__init__") if inspect.isclass(public) else public
    _, heading, arguments = (inspect.getdoc(function) or "").partition("\nArgs:\n")
    if heading and inspect.isfunction(function):
        names = re.findall(r"^ {4}\*{0,2}(\w+(?:, \w+)*):", arguments, re.MULTILINE)
        described = {name for line in names for name in line.split(", ")}
        for name in inspect.signature(function).parameters:
            if name not in described and name not in {"self", "cls"}:
                yield name


@pytest.mark.parametrize(("name", "public"), OBJECTS, ids=[name for name, _ in OBJECTS])
def test_public_arguments_are_described_all_or_none(name: str, public: Any) -> None:
    assert list(undescribed(public)) == []


@pytest.mark.parametrize(("name", "public"), OBJECTS, ids=[name for name, _ in OBJECTS])
def test_docstring_sections_come_in_one_order(name: str, public: Any) -> None:
    lines = (inspect.getdoc(public) or "").splitlines()
    sections = [line for line in lines if line in SECTIONS]
    assert sections == sorted(sections, key=SECTIONS.index), name


def places(node: ast.AST, prefix: str) -> Iterator[tuple[str, str]]:
    """Yield the qualified names of classes and functions, with their docstrings."""
    for child in ast.iter_child_nodes(node):
        name = prefix
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            name = f"{prefix}.{child.name}"
            yield name, ast.get_docstring(child) or ""
        yield from places(child, name)


@pytest.mark.parametrize("path", python_files(PACKAGE), ids=name_of)
def test_private_docstrings_have_no_sections_for_users(path: Path) -> None:
    long = [
        name
        for name, docstring in places(parse(path), module_of(path))
        if name not in PUBLIC_PLACES and FOR_USERS.intersection(docstring.splitlines())
    ]
    assert long == []
