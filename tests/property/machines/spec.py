"""What the catalog says of one machine, and builds of its source that may be mutated.

States and events are told by their names here: a mutated build of a module has enums of
its own.
"""

from __future__ import annotations

import enum
import itertools
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:  # `mutated_source` reads this before any module of the package
    from asyncrpc.core.state_table import StateTable

Table: TypeAlias = "StateTable[Any, Any]"

_serials = itertools.count()


@dataclass(frozen=True, slots=True)
class Guard:
    """A mutant that is no change of the table: one text of the source is replaced."""

    name: str
    old: str
    new: str


def guards(text: str) -> tuple[Guard, ...]:
    r"""Read mutants, each `name: old => new` over as many lines as it takes.

    Lines that go on are indented; `\n` is the end of a line of the source.
    """
    read = []
    for entry in re.split(r"\n(?=\S)", text.strip()):
        whole = re.sub(r"\n +", " ", re.sub(r"\n +\\n", r"\\n", entry))
        name, change = whole.replace(r"\n", "\n").split(": ", 1)
        old, _, new = f"{change} ".partition(" => ")
        read.append(Guard(name, old, new.removesuffix(" ")))
    return tuple(read)


@dataclass(frozen=True, slots=True)
class Part:
    """A module of a machine beside the one that has the table."""

    source: ModuleType  # that module
    # What must hold of every build of it.
    checks: tuple[Callable[[ModuleType], None], ...]
    guards: tuple[Guard, ...]  # its mutants


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine whose transitions are data."""

    name: str  # as the page calls it
    about: str  # what it decides, in a sentence or two
    source: ModuleType  # the module that has it
    states: str  # the name of the enum of its states there
    # The states that it may begin in; the first is reached by `begin` alone.
    starts: tuple[str, ...]
    # Makes one, in one of `starts`, of a build of the module.
    begin: Callable[[ModuleType, str], Any]
    stories: str  # traces, as `stories` reads them; together they show every transition
    # Lets an event happen.
    feed: Callable[[Any, Any], object] = lambda machine, event: machine.on(event)
    # Returns the present state.
    state_of: Callable[[Any], enum.Enum] = lambda machine: machine.state
    events: str = ""  # the enum of its events; empty: `XEvent` for `XState`
    # Of states and events by their names, where their values are single words.
    meanings: Mapping[str, str] = field(default_factory=dict)
    # The errors that differ from the table's, by state and event.
    refusals: Mapping[tuple[str, str], str] = field(default_factory=dict)
    # What must hold of every build of the module, beside walk and stories.
    checks: tuple[Callable[[ModuleType], None], ...] = ()
    # The files of further tests of the machine, for mutants that no check finds.
    tests: tuple[str, ...] = ()
    guards: tuple[Guard, ...] = ()  # mutants of what is not in the table
    parts: tuple[Part, ...] = ()  # what else the machine consists of

    @property
    def all_parts(self) -> tuple[Part, ...]:
        return Part(self.source, self.checks, self.guards), *self.parts

    def states_in(self, build: ModuleType) -> type[enum.Enum]:
        states: type[enum.Enum] = getattr(build, self.states)
        return states

    def events_in(self, build: ModuleType) -> type[enum.Enum]:
        events: type[enum.Enum] = getattr(
            build, self.events or self.states.replace("State", "Event")
        )
        return events

    @property
    def refusal(self) -> str:
        """Return the error that an event raises which is not listed; empty: none."""
        table = table_of(self.source)
        return "" if table.late else table.error.__name__

    def error_for(self, state: str, event: str) -> str:
        """Return which error an event raises that is not listed; empty: none."""
        return self.refusals.get((state, event), self.refusal)


def table_of(build: ModuleType) -> Table:
    """Return the transitions of a build."""
    table: Table = build.TRANSITIONS
    return table


@contextmanager
def build_of(source: ModuleType, guard: Guard | None = None) -> Iterator[ModuleType]:
    """Build a module once more from its source, perhaps mutated."""
    text = source_of(source, guard)
    build = ModuleType(f"build_{next(_serials)}_of_{source.__name__}")
    sys.modules[build.__name__] = build  # dataclasses look their module up
    try:
        code = compile(text, str(source.__file__), "exec")
        exec(code, vars(build))  # noqa: S102  # our own source, one text replaced
        yield build
    finally:
        del sys.modules[build.__name__]


def source_of(source: ModuleType, guard: Guard | None = None) -> str:
    """Return the text of a module, perhaps mutated."""
    text = Path(str(source.__file__)).read_text(encoding="utf-8")
    return text if guard is None else mutated(text, guard, source.__name__)


def mutated(text: str, guard: Guard, module: str) -> str:
    """Return a source with one text replaced."""
    if text.count(guard.old) != 1:
        raise ValueError(
            f"mutant {guard.name!r} fits {text.count(guard.old)} places in {module}: "
            "bring it up to date"
        )
    return text.replace(guard.old, guard.new)
