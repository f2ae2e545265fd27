"""A name of a class means one thing in this package.

A leading underscore does not make another name.  A protocol may share a name with
others and with one class if all are views of that class: it has every member of each.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from tests.architecture.sources import PACKAGE, name_of, parse, python_files

# The same thing for another public: torch's names over ours, and the public worker.
TWINS = {
    "Cluster",  # of processes; and that of `asyncrpc.testing`, in one
    "DistributedOptimizer",
    "RRef",
    "RemoteModule",  # and `_RemoteModule`, which programs know from torch, too
    "Worker",
}


class Definition(NamedTuple):
    """A class, and where it is."""

    at: str
    node: ast.ClassDef

    @property
    def is_protocol(self) -> bool:
        return "Protocol" in self.bases

    @property
    def bases(self) -> list[str]:
        return [ast.unparse(base).partition("[")[0] for base in self.node.bases]


def definitions() -> dict[str, list[Definition]]:
    """Return the classes of the package's modules, by name."""
    definitions_by_name = defaultdict(list)
    for path in python_files(PACKAGE):
        for node in parse(path).body:
            if isinstance(node, ast.ClassDef):
                name = node.name.lstrip("_")
                definitions_by_name[name].append(
                    Definition(f"{name_of(path)}:{node.name}", node)
                )
    return definitions_by_name


DEFINITIONS = definitions()


def class_named(name: str) -> Definition | None:
    """Return the class of this name that is not a protocol."""
    definitions_found = DEFINITIONS.get(name.lstrip("_"), [])
    return next(
        (definition for definition in definitions_found if not definition.is_protocol),
        None,
    )


def members_of(definition: Definition) -> Iterator[str]:
    """Yield the names of methods and attributes, with those of the bases."""
    for node in ast.walk(definition.node):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name
    for base in definition.bases:
        inherited = class_named(base)
        if inherited is not None and inherited != definition:
            yield from members_of(inherited)


def unrelated(name: str) -> list[str]:
    """Return the protocols of a name that are not views of its one class."""
    protocols = [
        definition for definition in DEFINITIONS[name] if definition.is_protocol
    ]
    if len(DEFINITIONS[name]) == 1 or not protocols:
        return []
    viewed = class_named(name)
    has = set() if viewed is None else set(members_of(viewed))
    return [
        protocol.at for protocol in protocols if not set(members_of(protocol)) <= has
    ]


def test_class_names_are_unique() -> None:
    shared = {
        name: at
        for name, definitions in DEFINITIONS.items()
        if len(
            at := [
                definition.at
                for definition in definitions
                if not definition.is_protocol
            ]
        )
        > 1
    }
    assert {name: at for name, at in shared.items() if name not in TWINS} == {}


def test_protocols_that_share_a_name_are_views_of_one_class() -> None:
    strays = {name: at for name in DEFINITIONS if (at := unrelated(name))}
    assert strays == {}


def test_each_twin_is_needed() -> None:
    shared = {name for name, definitions in DEFINITIONS.items() if len(definitions) > 1}
    assert shared >= TWINS
