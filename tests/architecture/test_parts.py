"""The package is made of parts that can be read, built and tested one at a time.

*   Files import one another in small circles at most; imports for types count, since a
    reader follows them.
*   A class has at most one ancestor of this package, its bases' bases included.
    Exceptions and contracts are free: they say what something is, and hold no state.
    A contract is a protocol, an abstract base class, or a class whose `__slots__` are
    empty, such as `Message`; and it has no `__init__`.
*   A class is short together with its ancestors: an object holds its parts, and does
    not inherit them.

A class counts wherever it is defined, in another class or in a function, too.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from tests.architecture.sources import PACKAGE, REPOSITORY, parse, python_files

CIRCLE_FILES_MAX = 5
ANCESTORS_MAX = 1
CLASS_LINES_MAX = 500

# Bases that make a class a contract; `asyncio.Protocol` is none of them.
_PROTOCOL = "typing.Protocol"
_CONTRACTS = {_PROTOCOL, "abc.ABC"}
_ERRORS = {
    name
    for name, one in vars(builtins).items()
    if isinstance(one, type) and issubclass(one, BaseException)
}


# --- circles of imports --------------------------------------------------------------


def module_of(path: Path) -> str:
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in python_files(PACKAGE)}


@cache
def tree_of(module: str) -> ast.Module:
    return parse(MODULES[module])


def imports_of(module: str) -> set[str]:
    """Return what a module imports, but for the types that it names.

    A type is named where it is used, so that a reader gets to the class; the order of
    the packages holds for types, too, and import-linter checks it.
    """
    found = set()
    tree = tree_of(module)
    types = {
        part
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for part in ast.walk(node)
    }
    for node in ast.walk(tree):
        if node in types:
            continue
        match node:
            case ast.ImportFrom(module=str(base), names=names, level=0):
                for alias in names:
                    part = f"{base}.{alias.name}"
                    found.add(part if part in MODULES else base)
            case ast.Import(names=names):
                found.update(alias.name for alias in names)
    return {one for one in found if one in MODULES and one != module}


def circles(graph: Mapping[str, Iterable[str]]) -> list[set[str]]:
    """Return the sets of nodes that reach one another, but for single ones (Tarjan)."""
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[set[str]] = []

    def visit(node: str) -> None:
        low[node] = at = len(low)
        stack.append(node)
        for other in graph[node]:
            if other not in low:
                visit(other)
            if other in stack:
                low[node] = min(low[node], low[other])
        if low[node] == at:
            start = stack.index(node)
            found.append(set(stack[start:]))
            del stack[start:]

    for node in graph:
        if node not in low:
            visit(node)
    return [one for one in found if len(one) > 1]


def test_import_circles_are_small() -> None:
    large = [
        sorted(one)
        for one in circles({name: imports_of(name) for name in MODULES})
        if len(one) > CIRCLE_FILES_MAX
    ]
    assert large == []


def test_import_circles_are_found() -> None:
    graph = {"a": "b", "b": "c", "c": "a", "d": "ae", "e": "d", "f": "a", "g": ""}
    assert sorted(map(sorted, circles(graph))) == [["a", "b", "c"], ["d", "e"]]


# --- classes and their bases ---------------------------------------------------------


@dataclass(frozen=True)
class Class:
    name: str  # dotted
    lines: int
    bases: tuple[str, ...]  # dotted; what is imported from nowhere as it is written
    defines_init: bool
    has_empty_slots: bool


def classes_of(tree: ast.Module, module: str) -> Iterator[Class]:
    names = names_in(tree, module)
    for name, node in definitions_in(tree, module):
        bases = (ast.unparse(base).partition("[")[0] for base in node.bases)
        yield Class(
            name,
            (node.end_lineno or node.lineno) - node.lineno + 1,
            tuple(resolved(base, names) for base in bases),
            defines_init(node),
            has_empty_slots(node),
        )


def definitions_in(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.ClassDef]]:
    """Yield every class with its dotted name, those in classes and functions, too."""
    for child in ast.iter_child_nodes(node):
        name = prefix
        if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            name = f"{prefix}.{child.name}"
        if isinstance(child, ast.ClassDef):
            yield name, child
        yield from definitions_in(child, name)


def defines_init(node: ast.ClassDef) -> bool:
    names = {one.name for one in node.body if isinstance(one, ast.FunctionDef)}
    return bool(names & {"__init__", "__new__"})


def has_empty_slots(node: ast.ClassDef) -> bool:
    texts = {ast.unparse(one) for one in node.body if isinstance(one, ast.Assign)}
    return "__slots__ = ()" in texts


def names_in(tree: ast.Module, module: str) -> dict[str, str]:
    """Return what names of a file stand for."""
    found = {}
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(base), names=names, level=0):
                for alias in names:
                    found[alias.asname or alias.name] = f"{base}.{alias.name}"
            case ast.Import(names=names):
                found.update(
                    {alias.asname: alias.name for alias in names if alias.asname}
                )
    for name, node in definitions_in(tree, module):
        found[node.name] = name
    return found


def resolved(base: str, names: Mapping[str, str]) -> str:
    first, dot, rest = base.partition(".")
    return names.get(first, first) + dot + rest


@cache
def all_classes() -> dict[str, Class]:
    return {
        one.name: one
        for module in MODULES
        for one in classes_of(tree_of(module), module)
    }


@cache
def names_of(module: str) -> dict[str, str]:
    return names_in(tree_of(module), module)


def class_named(base: str) -> Class | None:
    """Return a class of this package, also by the name that a package passes it on as.

    `asyncrpc.runtime.Worker` is a class of `asyncrpc.runtime.worker`.
    """
    known = all_classes()
    if base in known:
        return known[base]
    module, _, name = base.rpartition(".")
    if module in MODULES:
        passed_on = names_of(module).get(name)
        return None if passed_on in {None, base} else class_named(str(passed_on))
    return None


def lineage(one: Class) -> list[Class]:
    """Return a class and all its bases of this package, itself last."""
    graph: dict[str, list[str]] = {}
    todo = [one]
    while todo:
        each = todo.pop()
        bases = [base for name in each.bases if (base := class_named(name)) is not None]
        graph[each.name] = [base.name for base in bases]
        todo += (base for base in bases if base.name not in graph)
    order = TopologicalSorter(graph).static_order()
    return [one if name == one.name else all_classes()[name] for name in order]


def is_protocol(one: Class) -> bool:
    return _PROTOCOL in one.bases


def is_contract(one: Class) -> bool:
    """Return whether a class says what something is, and holds nothing itself."""
    is_one = one.has_empty_slots or bool(_CONTRACTS & set(one.bases))
    return is_one and not one.defines_init


def is_error(one: Class) -> bool:
    return any(_ERRORS & set(each.bases) for each in lineage(one))


def ancestors(one: Class) -> list[str]:
    """Return the bases of a class, and their bases, that may hold state."""
    return [each.name for each in lineage(one)[:-1] if not is_contract(each)]


def total_lines(one: Class) -> int:
    return sum(each.lines for each in lineage(one) if not is_protocol(each))


CLASSES = [one for one in all_classes().values() if not is_error(one)]


def test_class_has_at_most_one_ancestor_of_this_package() -> None:
    many = {one.name: ancestors(one) for one in CLASSES}
    assert {name: of for name, of in many.items() if len(of) > ANCESTORS_MAX} == {}


def test_class_is_short_together_with_its_ancestors() -> None:
    long = {one.name for one in CLASSES if total_lines(one) > CLASS_LINES_MAX}
    assert long == set()


# --- the rules themselves ------------------------------------------------------------


def declared(source: str) -> dict[str, Class]:
    """Return the classes of a file of this package, by the last part of their names."""
    found = classes_of(ast.parse(source), "asyncrpc.tried")
    return {one.name.removeprefix("asyncrpc.tried."): one for one in found}


def test_bases_are_found_through_packages() -> None:
    """A facade's class of workers would be one of the runtime, two bases up."""
    found = declared(
        "from asyncrpc.api import Worker\nclass FacadeWorker(Worker): ...\n"
    )
    assert ancestors(found["FacadeWorker"]) == [
        "asyncrpc.runtime.worker.Worker",
        "asyncrpc.api.Worker",
    ]
    assert total_lines(found["FacadeWorker"]) > total_lines(
        all_classes()["asyncrpc.runtime.worker.Worker"]
    )


def test_nested_classes_are_found() -> None:
    found = declared(
        "from asyncrpc import api\n"
        "class Outer:\n"
        "    class Inner(api.Worker): ...\n"
        "def make():\n"
        "    if True:\n"
        "        class Local: ...\n"
    )
    assert set(found) == {"Outer", "Outer.Inner", "make.Local"}
    assert len(ancestors(found["Outer.Inner"])) > ANCESTORS_MAX


def test_contracts_are_told_from_classes_of_the_same_names() -> None:
    found = declared(
        "import abc\n"
        "import asyncio\n"
        "import typing as t\n"
        "from typing import Protocol\n"
        "class Role(Protocol): ...\n"
        "class Other(t.Protocol): ...\n"
        "class Base(abc.ABC): ...\n"
        "class Bare:\n"
        "    __slots__ = ()\n"
        "class Reader(asyncio.Protocol): ...\n"
        "class Made:\n"
        "    __slots__ = ()\n"
        "    def __init__(self): ...\n"
    )
    contracts = {name for name, one in found.items() if is_contract(one)}
    assert contracts == {"Role", "Other", "Base", "Bare"}


def test_errors_derive_from_any_builtin_exception() -> None:
    found = declared("class A(TimeoutError): ...\nclass B: ...\n")
    assert [name for name, one in found.items() if is_error(one)] == ["A"]
