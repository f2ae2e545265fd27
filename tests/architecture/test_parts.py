"""The package is made of parts that can be read, built and tested one at a time.

*   Files import one another in small circles at most; imports for types count, since a
    reader follows them.
*   A class has at most one base class of this package.  Exceptions, protocols and
    abstract contracts are free: they say what something is, and hold no state.
*   A class is short together with its bases: an object holds its parts, and does not
    inherit them.

What does not hold yet is listed.  An entry that holds again fails here, too: take it
out, so that the lists only shrink.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from tests.architecture.sources import PACKAGE, REPOSITORY, parse, python_files

CIRCLE_FILES_MAX = 5
BASES_MAX = 1
CLASS_LINES_MAX = 500

# Classes with more lines.
LONG_LEFT = {
    "asyncrpc.collectives.group.Group",  # half of it is docstrings
    "asyncrpc.compat.rpc._testing.faulty_worker.FaultyWorker",
}

# Bases that make a class a contract, or a kind of error; by the name that is written.
_CONTRACTS = {"ABC", "Protocol", "TypedDict", "NamedTuple"}
_ERRORS = {"BaseException", "Exception"}


# --- circles of imports --------------------------------------------------------------


def module_of(path: Path) -> str:
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in python_files(PACKAGE)}


@cache
def tree_of(module: str) -> ast.Module:
    return parse(MODULES[module])


def imports_of(module: str) -> set[str]:
    found = set()
    for node in ast.walk(tree_of(module)):
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


def test_files_import_one_another_in_small_circles_only() -> None:
    large = [
        sorted(one)
        for one in circles({name: imports_of(name) for name in MODULES})
        if len(one) > CIRCLE_FILES_MAX
    ]
    assert large == []


def test_circles_are_found() -> None:
    graph = {"a": "b", "b": "c", "c": "a", "d": "ae", "e": "d", "f": "a", "g": ""}
    assert sorted(map(sorted, circles(graph))) == [["a", "b", "c"], ["d", "e"]]


# --- classes and their bases ---------------------------------------------------------


@dataclass(frozen=True)
class Class:
    name: str  # dotted
    lines: int
    bases: tuple[str, ...]  # of this package, dotted; others by what is written


def classes_of(module: str) -> Iterator[Class]:
    names = names_in(module)
    for node in tree_of(module).body:
        if isinstance(node, ast.ClassDef):
            bases = (ast.unparse(base).partition("[")[0] for base in node.bases)
            yield Class(
                f"{module}.{node.name}",
                (node.end_lineno or node.lineno) - node.lineno + 1,
                tuple(resolved(base, names) for base in bases),
            )


@cache
def names_in(module: str) -> dict[str, str]:
    """Return what names of a file stand for."""
    found = {}
    for node in ast.walk(tree_of(module)):
        match node:
            case ast.ImportFrom(module=str(base), names=names, level=0):
                for alias in names:
                    found[alias.asname or alias.name] = f"{base}.{alias.name}"
            case ast.ClassDef(name=name):
                found[name] = f"{module}.{name}"
    return found


def resolved(base: str, names: Mapping[str, str]) -> str:
    first, dot, rest = base.partition(".")
    return names.get(first, first) + dot + rest


@cache
def all_classes() -> dict[str, Class]:
    return {one.name: one for module in MODULES for one in classes_of(module)}


def class_named(base: str) -> Class | None:
    """Return a class of this package, also by the name that a package passes it on as.

    `asyncrpc.runtime.Worker` is a class of `asyncrpc.runtime.worker`.
    """
    known = all_classes()
    if base in known:
        return known[base]
    module, _, name = base.rpartition(".")
    if module in MODULES:
        passed_on = names_in(module).get(name)
        return None if passed_on in {None, base} else class_named(str(passed_on))
    return None


def lineage(one: Class) -> list[Class]:
    """Return a class and all its bases of this package."""
    graph: dict[str, list[str]] = {}
    todo = [one]
    while todo:
        each = todo.pop()
        bases = [base for name in each.bases if (base := class_named(name)) is not None]
        graph[each.name] = [base.name for base in bases]
        todo += (base for base in bases if base.name not in graph)
    order = TopologicalSorter(graph).static_order()
    return [all_classes()[name] for name in order]


def has_base(one: Class, names: set[str]) -> bool:
    written = {base.rpartition(".")[2] for each in lineage(one) for base in each.bases}
    return bool(written & names)


def is_contract(one: Class) -> bool:
    """Return whether a class itself is a protocol, or an abstract base class."""
    return bool({base.rpartition(".")[2] for base in one.bases} & _CONTRACTS)


def is_error(one: Class) -> bool:
    return has_base(one, _ERRORS)


def parts_inherited(one: Class) -> list[str]:
    """Return the bases of a class that may hold state."""
    bases = [base for name in one.bases if (base := class_named(name)) is not None]
    return [base.name for base in bases if not is_contract(base)]


def total_lines(one: Class) -> int:
    return sum(each.lines for each in lineage(one) if not is_contract(each))


CLASSES = [one for one in all_classes().values() if not is_error(one)]


def test_a_class_has_at_most_one_base_of_this_package() -> None:
    many = {one.name for one in CLASSES if len(parts_inherited(one)) > BASES_MAX}
    assert many == set()


def test_a_class_is_short_together_with_its_bases() -> None:
    long = {one.name for one in CLASSES if total_lines(one) > CLASS_LINES_MAX}
    assert long - LONG_LEFT == set()
    assert LONG_LEFT - long == set(), "these hold: take them out of the list"


def test_bases_are_found_through_packages() -> None:
    """The facade's worker is one of `asyncrpc.api`, and so one of the runtime."""
    facade = all_classes()["asyncrpc.compat.rpc.starting.FacadeWorker"]
    names = [one.name for one in lineage(facade)]
    assert names[-2:] == ["asyncrpc.api.Worker", facade.name]
    assert "asyncrpc.runtime.worker.Worker" in names
