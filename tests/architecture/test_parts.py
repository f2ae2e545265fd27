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

from tests.architecture.sources import PACKAGE, module_of, parse, python_files

CIRCLE_FILES_MAX = 5
ANCESTORS_MAX = 1
CLASS_LINES_MAX = 500

# Bases that make a class a contract; `asyncio.Protocol` is none of them.
_PROTOCOL = "typing.Protocol"
_CONTRACTS = {_PROTOCOL, "abc.ABC"}
_ERRORS = {
    name
    for name, error in vars(builtins).items()
    if isinstance(error, type) and issubclass(error, BaseException)
}


# --- circles of imports --------------------------------------------------------------


MODULES = {module_of(path): path for path in python_files(PACKAGE)}


@cache
def tree_of(module: str) -> ast.Module:
    return parse(MODULES[module])


def imports_of(module: str) -> set[str]:
    """Return what a module imports, but for the types that it names.

    A type is named where it is used, so that a reader gets to the class; the order of
    the packages holds for types, too, and import-linter checks it.
    """
    modules = set()
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
                    modules.add(part if part in MODULES else base)
            case ast.Import(names=names):
                modules.update(alias.name for alias in names)
    return {
        imported for imported in modules if imported in MODULES and imported != module
    }


def circles(graph: Mapping[str, Iterable[str]]) -> list[set[str]]:
    """Return the sets of nodes that reach one another, but for single ones (Tarjan)."""
    low: dict[str, int] = {}
    stack: list[str] = []
    circles_found: list[set[str]] = []

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
            circles_found.append(set(stack[start:]))
            del stack[start:]

    for node in graph:
        if node not in low:
            visit(node)
    return [circle for circle in circles_found if len(circle) > 1]


def test_import_circles_are_small() -> None:
    large = [
        sorted(circle)
        for circle in circles({name: imports_of(name) for name in MODULES})
        if len(circle) > CIRCLE_FILES_MAX
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
    names = {
        statement.name
        for statement in node.body
        if isinstance(statement, ast.FunctionDef)
    }
    return bool(names & {"__init__", "__new__"})


def has_empty_slots(node: ast.ClassDef) -> bool:
    texts = {
        ast.unparse(statement)
        for statement in node.body
        if isinstance(statement, ast.Assign)
    }
    return "__slots__ = ()" in texts


def names_in(tree: ast.Module, module: str) -> dict[str, str]:
    """Return what names of a file stand for."""
    bindings = {}
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(base), names=names, level=0):
                for alias in names:
                    bindings[alias.asname or alias.name] = f"{base}.{alias.name}"
            case ast.Import(names=names):
                bindings.update(
                    {alias.asname: alias.name for alias in names if alias.asname}
                )
    for name, node in definitions_in(tree, module):
        bindings[node.name] = name
    return bindings


def resolved(base: str, names: Mapping[str, str]) -> str:
    first, dot, rest = base.partition(".")
    return names.get(first, first) + dot + rest


@cache
def all_classes() -> dict[str, Class]:
    return {
        definition.name: definition
        for module in MODULES
        for definition in classes_of(tree_of(module), module)
    }


@cache
def names_of(module: str) -> dict[str, str]:
    return names_in(tree_of(module), module)


def class_named(base: str) -> Class | None:
    """Return a class of this package, also by the name that a package passes it on as.

    `asyncrpc.runtime.Worker` is a class of `asyncrpc.core.worker`.
    """
    known = all_classes()
    if base in known:
        return known[base]
    module, _, name = base.rpartition(".")
    if module in MODULES:
        passed_on = names_of(module).get(name)
        return None if passed_on in {None, base} else class_named(str(passed_on))
    return None


def lineage(definition: Class) -> list[Class]:
    """Return a class and all its bases of this package, itself last."""
    graph: dict[str, list[str]] = {}
    todo = [definition]
    while todo:
        each = todo.pop()
        bases = [base for name in each.bases if (base := class_named(name)) is not None]
        graph[each.name] = [base.name for base in bases]
        todo += (base for base in bases if base.name not in graph)
    order = TopologicalSorter(graph).static_order()
    return [
        definition if name == definition.name else all_classes()[name] for name in order
    ]


def is_protocol(definition: Class) -> bool:
    return _PROTOCOL in definition.bases


def is_contract(definition: Class) -> bool:
    """Return whether a class says what something is, and holds nothing itself."""
    is_one = definition.has_empty_slots or bool(_CONTRACTS & set(definition.bases))
    return is_one and not definition.defines_init


def is_error(definition: Class) -> bool:
    return any(_ERRORS & set(each.bases) for each in lineage(definition))


def ancestors(definition: Class) -> list[str]:
    """Return the bases of a class, and their bases, that may hold state."""
    return [each.name for each in lineage(definition)[:-1] if not is_contract(each)]


def total_lines(definition: Class) -> int:
    return sum(each.lines for each in lineage(definition) if not is_protocol(each))


CLASSES = [
    definition for definition in all_classes().values() if not is_error(definition)
]


def test_class_has_at_most_one_ancestor_of_this_package() -> None:
    many = {definition.name: ancestors(definition) for definition in CLASSES}
    assert {name: of for name, of in many.items() if len(of) > ANCESTORS_MAX} == {}


def test_class_is_short_together_with_its_ancestors() -> None:
    long = {
        definition.name
        for definition in CLASSES
        if total_lines(definition) > CLASS_LINES_MAX
    }
    assert long == set()


# --- the rules themselves ------------------------------------------------------------


def declared(source: str) -> dict[str, Class]:
    """Return the classes of a file of this package, by the last part of their names."""
    definitions = classes_of(ast.parse(source), "asyncrpc.tried")
    return {
        definition.name.removeprefix("asyncrpc.tried."): definition
        for definition in definitions
    }


def test_bases_are_found_through_packages() -> None:
    """A facade's class of workers would be one of the runtime, two bases up."""
    definitions = declared(
        "from asyncrpc.api import Worker\nclass FacadeWorker(Worker): ...\n"
    )
    assert ancestors(definitions["FacadeWorker"]) == [
        "asyncrpc.core.worker.Worker",
        "asyncrpc.api.Worker",
    ]
    assert total_lines(definitions["FacadeWorker"]) > total_lines(
        all_classes()["asyncrpc.core.worker.Worker"]
    )


def test_nested_classes_are_found() -> None:
    definitions = declared(
        "from asyncrpc import api\n"
        "class Outer:\n"
        "    class Inner(api.Worker): ...\n"
        "def make():\n"
        "    if True:\n"
        "        class Local: ...\n"
    )
    assert set(definitions) == {"Outer", "Outer.Inner", "make.Local"}
    assert len(ancestors(definitions["Outer.Inner"])) > ANCESTORS_MAX


def test_contracts_are_told_from_classes_of_the_same_names() -> None:
    definitions = declared(
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
    contracts = {
        name for name, definition in definitions.items() if is_contract(definition)
    }
    assert contracts == {"Role", "Other", "Base", "Bare"}


def test_errors_derive_from_any_builtin_exception() -> None:
    definitions = declared("class A(TimeoutError): ...\nclass B: ...\n")
    assert [
        name for name, definition in definitions.items() if is_error(definition)
    ] == ["A"]
