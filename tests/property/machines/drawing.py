"""Draws all machines of the catalog on one page.

$ python -m tests.property.machines.drawing build/docs/machines.md
"""

from __future__ import annotations

import enum
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Final

from tests.property.machines.catalog import CATALOG
from tests.property.machines.spec import Machine, table_of

ROOT: Final = Path(__file__).parents[3]
REFERENCE: Final = ROOT / "docs" / "reference"

_HEAD: Final = """\
# Machines

The states of each machine, and the events that change them, as the tables in the code.
A test sends every event in every state. Other tests change each table and each guard
on purpose, and check that a test then fails (`make mutants`).
"""


def page(folder: Path) -> str:
    """Return the page, with links as from a folder."""
    contents = "\n".join(
        f"- [{machine.name}](#{machine.name.lower().replace(' ', '-')})"
        for machine in CATALOG
    )
    sections = [section(machine, machine.source) for machine in CATALOG]
    text = "\n".join([_HEAD, contents, "", *sections])
    # The catalog's links are those of a page among the others.
    return re.sub(r"\]\((?!#)", f"]({os.path.relpath(REFERENCE, folder)}/", text)


def section(machine: Machine, build: ModuleType) -> str:
    """Draw one machine, of a build of its module."""
    code = ", ".join(f"`{part.source.__name__}`" for part in machine.all_parts)
    return "\n".join(
        [
            f"## {machine.name}",
            "",
            f"{machine.about}",
            "",
            f"Code: {code}.",
            "",
            "```mermaid",
            *diagram(machine, build),
            "```",
            "",
            *_meanings("state", machine.states_in(build), machine.meanings),
            "",
            *_meanings("event", machine.events_in(build), machine.meanings),
            "",
            *_what_is_left(machine),
            "",
        ]
    )


def diagram(machine: Machine, build: ModuleType) -> Iterator[str]:
    """Draw the table as mermaid text; arrows between the same states are joined."""
    yield "stateDiagram-v2"
    for start in machine.starts:
        yield f"    [*] --> {start}"
    for state, row in table_of(build).items():
        arrows: dict[enum.Enum, list[str]] = {}
        for event, after in row.items():
            arrows.setdefault(after, []).append(event.name)
        for after, names in arrows.items():
            yield f"    {state.name} --> {after.name}: {', '.join(names)}"
        if not any(after is not state for after in row.values()):
            yield f"    {state.name} --> [*]"


def _meanings(
    what: str, names: type[enum.Enum], meanings: Mapping[str, str]
) -> Iterator[str]:
    yield f"| {what} | |"
    yield "| --- | --- |"
    for name in names:
        yield f"| `{name.name}` | {meanings.get(name.name, name.value)} |"


def _what_is_left(machine: Machine) -> Iterator[str]:
    if machine.refusal:
        yield f"An event that is not drawn for a state raises `{machine.refusal}`."
    else:
        yield "An event that is not drawn for a state is late, and changes nothing."
    states: dict[tuple[str, str], list[str]] = {}
    for (state, event), error in machine.refusals.items():
        states.setdefault((event, error), []).append(f"`{state}`")
    for (event, error), where in states.items():
        yield f"`{event}` in {', '.join(where)}: `{error}`."


if __name__ == "__main__":
    target = Path(sys.argv[1]).resolve()
    target.write_text(page(target.parent), encoding="utf-8")
