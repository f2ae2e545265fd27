"""One walk through a machine: every event in every state.

A listed event leads where the table says.  Any other is refused, or changes nothing, as
the catalog says; in both cases everything that the machine knows is as before.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from types import ModuleType
from typing import Any

from asyncrpc import errors
from tests.property.machines.spec import Machine, table_of

Path = tuple[str, tuple[enum.Enum, ...]]  # the first state, and the events from there


def paths_to_all(machine: Machine, build: ModuleType) -> dict[enum.Enum, Path]:
    """Return a shortest path to each state that can be reached."""
    states = machine.states_in(build)
    paths: dict[enum.Enum, Path] = {
        states[start]: (start, ()) for start in machine.starts
    }
    todo = deque(paths)
    while todo:
        state = todo.popleft()
        start, events = paths[state]
        for event, after in table_of(build)[state].items():
            if after not in paths:
                paths[after] = start, (*events, event)
                todo.append(after)
    return paths


def led(machine: Machine, build: ModuleType, path: Path) -> Any:
    start, events = path
    subject = machine.begin(build, start)
    for event in events:
        machine.feed(subject, event)
    return subject


def walk(machine: Machine, build: ModuleType) -> int:
    """Go through every event in every state; return how many there were."""
    states, events = machine.states_in(build), machine.events_in(build)
    paths = paths_to_all(machine, build)
    assert paths.keys() == set(states), "a state cannot be reached"
    count = 0
    for state in states:
        for event in events:
            subject = led(machine, build, paths[state])
            assert machine.state_of(subject) is state, f"led to {state}"
            after = table_of(build)[state].get(event)
            if after is None:
                _check_refusal(machine, subject, state, event)
            else:
                machine.feed(subject, event)
                assert machine.state_of(subject) is after, f"{event} in {state}"
            count += 1
    return count


def _check_refusal(
    machine: Machine, subject: Any, state: enum.Enum, event: enum.Enum
) -> None:
    before = facts(subject)
    name = machine.error_for(state.name, event.name)
    error = error_of(machine, subject, event)
    error_name = "" if error is None else type(error).__name__
    assert error_name == name, f"{event} in {state}: {error!r}"
    assert facts(subject) == before, f"{event} in {state} has changed something"


def error_of(
    machine: Machine, subject: Any, event: enum.Enum
) -> errors.AsyncRpcError | None:
    """Let an event happen; return the error that it is refused with, if it is."""
    try:
        machine.feed(subject, event)
    except errors.AsyncRpcError as error:
        return error
    return None


def facts(thing: object) -> object:
    """Return all that an object knows, as something that can be compared."""
    if thing is None or isinstance(thing, str | bytes | int | float | enum.Enum):
        return thing
    if isinstance(thing, Mapping):
        return [(facts(key), facts(value)) for key, value in thing.items()]
    if isinstance(thing, list | tuple | deque):
        return [facts(item) for item in thing]
    if isinstance(thing, set | frozenset):
        return sorted(map(repr, thing))
    names = [
        name for cls in type(thing).__mro__ for name in getattr(cls, "__slots__", ())
    ]
    named = {name: getattr(thing, name) for name in names if hasattr(thing, name)}
    named |= getattr(thing, "__dict__", {})
    if callable(thing) or isinstance(thing, ModuleType) or not named:
        return id(thing)
    return [
        type(thing).__name__,
        *((name, facts(named[name])) for name in sorted(named)),
    ]


def visit_all(begin: Callable[[], Any], look: Callable[[Any, list[Any]], None]) -> int:
    """Let happen what can, in every order; return how many worlds there were.

    `look` gets each world, once, and what may happen next; it raises if that is wrong.
    """
    seen: set[Hashable] = set()
    todo: deque[tuple[Any, ...]] = deque([()])
    while todo:
        actions = todo.popleft()
        try:
            world = begin()
            for action in actions:
                world.do(action)
            state = world.facts()
            if state not in seen:
                seen.add(state)
                possible = list(world.possible())
                todo += [(*actions, action) for action in possible]
                look(world, possible)
        except AssertionError as error:
            error.add_note(" ".join(map(str, actions)))
            raise
    return len(seen)
