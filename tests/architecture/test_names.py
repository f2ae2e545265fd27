"""A name of a class means one thing in this package.

A leading underscore makes no other name.  A protocol is a view of a part and bears the
part's name: any number of protocols may share a name, with one class that is none.
"""

from __future__ import annotations

import ast
from collections import defaultdict

from tests.architecture.sources import PACKAGE, name_of, parse, python_files

# The same thing for another public: torch's names over ours, and the public worker.
TWINS = {
    "DistributedOptimizer",
    "RRef",
    "RemoteModule",  # and `_RemoteModule`, which programs know of torch, too
    "Worker",
    "profile",  # torch has two profilers of this name
}


def classes_by_name() -> dict[str, list[str]]:
    """Return where each name stands for a class that is no protocol."""
    found = defaultdict(list)
    for path in python_files(PACKAGE):
        for node in parse(path).body:
            if isinstance(node, ast.ClassDef) and not is_protocol(node):
                found[node.name.lstrip("_")].append(f"{name_of(path)}:{node.name}")
    return found


def is_protocol(node: ast.ClassDef) -> bool:
    return "Protocol" in {ast.unparse(base).partition("[")[0] for base in node.bases}


def test_no_two_classes_share_a_name() -> None:
    shared = {name: at for name, at in classes_by_name().items() if len(at) > 1}
    assert {name: at for name, at in shared.items() if name not in TWINS} == {}
