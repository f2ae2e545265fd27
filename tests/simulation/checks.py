"""What must hold of the workers of a world at quiet moments, I1 to I3 among it.

I3 is asked of memory itself: whatever a worker can reach is searched for the numbers of
incarnations that have ended, so that a new table cannot be forgotten here.

Source: docs/reference/rref-protocol.md.
"""

from __future__ import annotations

import asyncio
import types
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, Final

import torch

from asyncrpc.core.ids import Incarnation
from asyncrpc.core.transport.memory import MemoryListener, MemoryTransport
from asyncrpc.testing.loop import describe_task
from asyncrpc.testing.network import Network
from asyncrpc.trace import EventRing
from tests.simulation.participant import Participant
from tests.simulation.world import World

# Tables of the dead, kept so that what comes late revives nothing; all are bounded.
TOMBSTONES: Final = frozenset({"_lost", "_dead", "_succeeded", "_passed"})
# Of each name the last incarnation that was heard of, until a newer one is.
LAST_KNOWN: Final = (".member.incarnation", "._table._by_life.keys")
# Not looked into: what every worker shares, what belongs to nobody, and the last
# events, which are so many at most, whoever they tell of.
_ELSEWHERE: Final = (
    EventRing,
    Network,
    MemoryListener,
    MemoryTransport,
    World,
    asyncio.AbstractEventLoop,
    asyncio.Task,
    torch.Tensor,
    type,
    types.ModuleType,
    types.CodeType,
    types.FrameType,
    str,
    bytes,
    bytearray,
    memoryview,
)


def problems_while_held(world: World) -> list[str]:
    """What is held is there: I1, at a moment when nothing is under way."""
    problems = []
    for name, worker in world.lives.items():
        for number, rref in worker.kept.items():
            owner = world.values.owner(number)
            is_lost = rref._shared.error is not None  # noqa: SLF001
            if owner is None or owner in world.buried or is_lost:
                continue
            if world.values.is_freed(number):
                problems.append(f"I1: value {number} is freed, and {name} holds it")
    return problems


def problems_after_drop(world: World) -> list[str]:
    """Nothing is left of what was shared, nor of those who died: I2 and I3."""
    alive = world.values.alive()
    problems = [f"I2: values {alive} are held by nobody and not freed"] if alive else []
    for name, worker in world.lives.items():
        references: Any = worker.parts.references
        counts = {what: n for what, n in references.counts().items() if n}
        if counts:
            problems.append(f"I2: {name} has {counts}")
        if worker.parts.active:
            problems.append(f"{name} serves {worker.parts.active} calls for nobody")
        for link in worker.parts.directory.links:
            # Members compare what they know from time to time: that goes on for ever.
            names = [call.function for call in link.pending]
            names += [inbound.function_name for inbound in link.served]
            waiting = sum(not name.startswith("membership.") for name in names)
            if waiting:
                problems.append(
                    f"{name}: {waiting} calls with {link.peer.name} are open"
                )
        dead = dict(traces_of(worker, world.buried))
        if dead:
            problems.append(f"I3: {name} remembers the dead: {dead}")
    return problems


def problems_after_end() -> list[str]:
    """No task is left but the one that asks."""
    left = [
        describe_task(task)
        for task in asyncio.all_tasks()
        if task is not asyncio.current_task()
    ]
    return [f"tasks are left: {sorted(left)}"] if left else []


def traces_of(
    worker: Participant, dead: Mapping[Incarnation, str]
) -> Iterator[tuple[str, str]]:
    """Find the dead in what a worker can reach: where, and who."""
    for path, thing in reachable(worker):
        if type(thing) is int and thing in dead and not path.endswith(LAST_KNOWN):
            yield path, dead[Incarnation(thing)]


def sizes_of(worker: Participant) -> Counter[str]:
    """Count the elements of each table that a worker has, by its path."""
    sizes: Counter[str] = Counter()
    for path, thing in reachable(worker):
        if isinstance(thing, Mapping | AbstractSet | list | tuple):
            sizes[path] += len(thing)
    return sizes


def reachable(worker: Participant) -> Iterator[tuple[str, Any]]:
    """Walk through all that a worker can reach, each thing once, with its path."""
    seen: set[int] = {id(worker.kept), id(worker.world)}
    waiting: list[tuple[str, Any]] = [("worker", worker)]
    while waiting:
        path, thing = waiting.pop()
        if isinstance(thing, int):
            yield path, thing
            continue
        if id(thing) in seen or isinstance(thing, _ELSEWHERE) or thing is None:
            continue
        if isinstance(thing, Participant) and thing is not worker:
            continue
        seen.add(id(thing))
        yield path, thing
        waiting += parts_of(path, thing)


def parts_of(path: str, thing: Any) -> list[tuple[str, Any]]:
    """Return what a thing holds, with paths."""
    if isinstance(thing, Mapping):
        keys = [(f"{path}.keys", key) for key in list(thing)]
        values = [
            (f"{path}[{key}]" if isinstance(key, str) else f"{path}[]", value)
            for key, value in list(thing.items())
        ]
        return keys + values
    if isinstance(thing, Collection) and not hasattr(thing, "__dict__"):
        return [(f"{path}[]", item) for item in list(thing)]
    return [
        (f"{path}.{name}", value)
        for name, value in attributes(thing)
        if name not in TOMBSTONES
    ]


def attributes(thing: Any) -> Iterator[tuple[str, Any]]:
    """Return the attributes of an object, those in slots and of closures included."""
    yield from getattr(thing, "__dict__", {}).items()
    for kind in type(thing).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if not name.startswith("__") and hasattr(thing, name):
                yield name, getattr(thing, name)
    if isinstance(thing, types.FunctionType):
        for number, cell in enumerate(thing.__closure__ or ()):
            yield f"cell{number}", cell
    elif isinstance(thing, types.MethodType):
        yield "__self__", thing.__self__
    elif isinstance(thing, types.CellType):
        yield "content", cell_content(thing)


def cell_content(cell: types.CellType) -> Any:
    """Return what a closure holds; nothing, if it is not bound yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None
