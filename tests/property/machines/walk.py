"""One walk through a machine: every event in every state.

A listed event leads where the table says.  Any other is refused, or changes nothing, as
the catalog says; in both cases everything that the machine knows is as before.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from asyncrpc import errors
from tests.property.machines.spec import Machine, table_of

Path = tuple[str, tuple[enum.Enum, ...]]  # the first state, and the events from there


def paths_to_all(machine: Machine, build: ModuleType) -> dict[enum.Enum, Path]:
    """Return a shortest path to each state that can be reached."""
    states = machine.states_in(build)
    found: dict[enum.Enum, Path] = {
        states[start]: (start, ()) for start in machine.starts
    }
    todo = deque(found)
    while todo:
        state = todo.popleft()
        start, events = found[state]
        for event, after in table_of(build)[state].items():
            if after not in found:
                found[after] = start, (*events, event)
                todo.append(after)
    return found


def led(machine: Machine, build: ModuleType, path: Path) -> Any:
    """Return a machine that has been led along a path."""
    start, events = path
    one = machine.begin(build, start)
    for event in events:
        machine.feed(one, event)
    return one


def walk(machine: Machine, build: ModuleType) -> int:
    """Go through every event in every state; return how many there were.

    Raises:
        AssertionError: one does not do what the table says.
    """
    states, events = machine.states_in(build), machine.events_in(build)
    paths = paths_to_all(machine, build)
    assert paths.keys() == set(states), "a state cannot be reached"
    count = 0
    for state in states:
        for event in events:
            one = led(machine, build, paths[state])
            assert machine.state_of(one) is state, f"led to {state}"
            after = table_of(build)[state].get(event)
            if after is None:
                _check_refusal(machine, one, state, event)
            else:
                machine.feed(one, event)
                assert machine.state_of(one) is after, f"{event} in {state}"
            count += 1
    return count


def _check_refusal(
    machine: Machine, one: Any, state: enum.Enum, event: enum.Enum
) -> None:
    before = facts(one)
    name = machine.error_for(state.name, event.name)
    error = error_of(machine, one, event)
    found = "" if error is None else type(error).__name__
    assert found == name, f"{event} in {state}: {error!r}"
    assert facts(one) == before, f"{event} in {state} has changed something"


def error_of(
    machine: Machine, one: Any, event: enum.Enum
) -> errors.AsyncRpcError | None:
    """Let an event happen; return the error that it is refused with, if it is."""
    try:
        machine.feed(one, event)
    except errors.AsyncRpcError as error:
        return error
    return None


def facts(one: object) -> object:
    """Return all that an object knows, as something that can be compared."""
    if one is None or isinstance(one, str | bytes | int | float | enum.Enum):
        return one
    if isinstance(one, Mapping):
        return [(facts(key), facts(value)) for key, value in one.items()]
    if isinstance(one, list | tuple | deque):
        return [facts(item) for item in one]
    if isinstance(one, set | frozenset):
        return sorted(map(repr, one))
    names = [
        name for cls in type(one).__mro__ for name in getattr(cls, "__slots__", ())
    ]
    named = {name: getattr(one, name) for name in names if hasattr(one, name)}
    named |= getattr(one, "__dict__", {})
    if callable(one) or isinstance(one, ModuleType) or not named:
        return id(one)
    return [type(one).__name__, *((name, facts(named[name])) for name in sorted(named))]
