"""What goes wrong in a run, and when: a schedule that its seed decides.

One fault follows another, and several may overlap; each ends before the run does.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final, TypeAlias

from tests.chaos.fleet import Fleet
from tests.chaos.history import CUT, History
from tests.chaos.log import now_s
from tests.chaos.wires import Wires

PAUSE_S: Final = 2.5  # mean, between the beginnings of two faults
OVERLAPPING_MAX: Final = 2

Fault: TypeAlias = Callable[["Chaos"], Coroutine[Any, Any, None]]


class Chaos:
    """Breaks things, one after another."""

    def __init__(
        self,
        fleet: Fleet,
        wires: Wires,
        seed: int,
        history: History,
        *,
        lost_after_s: float,
    ) -> None:
        self.injected: Counter[str] = Counter()  # how often each kind of fault was
        self.history = history  # when each was, and between whom
        self.fleet = fleet
        self.wires = wires
        self.rng = random.Random(seed)
        self.lost_after_s = lost_after_s
        self._busy: set[str] = set()  # workers that have a fault now

    async def run(self, seconds: float, said: Callable[[str], None]) -> None:
        """Break things for so long; all of it is mended when this returns."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + seconds
        under_way: dict[asyncio.Task[None], None] = {}
        kinds = {
            fault: weight
            for fault, weight in FAULTS.items()
            if self.can(fault.__name__.partition("_")[0])
        }
        async with asyncio.TaskGroup() as tasks:
            while loop.time() < until_s:
                await asyncio.sleep(self.rng.expovariate(1 / PAUSE_S))
                fault = self.rng.choices(list(kinds), list(kinds.values()))[0]
                if len(under_way) < OVERLAPPING_MAX:
                    said(fault.__name__)
                    task = tasks.create_task(fault(self))
                    under_way[task] = None
                    task.add_done_callback(under_way.pop)

    def can(self, kind: str) -> bool:
        return kind in self.wires.faults or kind in ("kill", "stop")

    def victim(self) -> str | None:
        """Choose a worker that has no other fault; None if all have."""
        free = [name for name in self.wires.names if name not in self._busy]
        return self.rng.choice(free) if len(free) > 1 else None

    def begin(self, kind: str, *names: str, life: str = "") -> Callable[[], None]:
        """Count a fault and enter it; return what enters its end."""
        self.injected[kind] += 1
        end = self.history.begin(kind, *names, at_s=now_s(), life=life)
        return lambda: end(now_s())

    async def pause(self, *names: str, seconds: float) -> None:
        """Let a fault of these workers last."""
        self._busy.update(names)
        try:
            await asyncio.sleep(seconds)
        finally:
            self._busy.difference_update(names)

    def pair(self) -> tuple[str, str]:
        """Choose two workers."""
        worker, other = self.rng.sample(self.wires.names, 2)
        return worker, other


async def kill(chaos: Chaos) -> None:
    """Kill a worker; start it again under its name, at once or later."""
    if (name := chaos.victim()) is None:
        return
    end = chaos.begin("SIGKILL", name, life=chaos.fleet.alive[name].label)
    await chaos.fleet.kill(name)
    await chaos.pause(name, seconds=chaos.rng.choice([0.0, 0.5, 5.0]))
    chaos._busy.add(name)  # noqa: SLF001  (of this module)
    await chaos.fleet.start(name)
    end()
    chaos._busy.discard(name)  # noqa: SLF001  (of this module)


async def stop(chaos: Chaos) -> None:
    """Stop a worker, for less time than makes it lost, or more."""
    if (name := chaos.victim()) is None:
        return
    is_long = chaos.rng.random() < 1 / 3
    end = chaos.begin("SIGSTOP, long" if is_long else "SIGSTOP, short", name)
    lasts_s = chaos.rng.uniform(0.2, 0.5 * chaos.lost_after_s)
    if is_long:
        lasts_s = chaos.lost_after_s + chaos.rng.uniform(3.0, 6.0)
    life = chaos.fleet.alive[name]
    life.signal(signal.SIGSTOP)
    await chaos.pause(name, seconds=lasts_s)
    life.signal(signal.SIGCONT)
    end()


async def cut(chaos: Chaos) -> None:
    """Break the connections between two workers, once or in a row."""
    worker, other = chaos.pair()
    for _ in range(chaos.rng.choice([1, 1, 5])):
        end = chaos.begin(CUT, worker, other)
        await chaos.wires.cut(worker, other)
        end()
        await asyncio.sleep(chaos.rng.uniform(0.0, 0.5))


async def partition(chaos: Chaos) -> None:
    """Part two workers, for less time than makes them lost, or more."""
    worker, other = chaos.pair()
    is_long = chaos.rng.random() < 1 / 3
    kind = "partition, long" if is_long else "partition, short"
    end = chaos.begin(kind, *chaos.wires.parted(worker, other))
    lasts_s = chaos.rng.uniform(0.2, 0.5 * chaos.lost_after_s)
    if is_long:
        lasts_s = chaos.lost_after_s + chaos.rng.uniform(3.0, 6.0)
    await chaos.wires.partition(worker, other)
    await asyncio.sleep(lasts_s)
    if chaos.rng.random() < 0.5:  # what is left of the connection is no use either
        await chaos.wires.cut(worker, other)
    await chaos.wires.heal(worker, other)
    end()


async def delay(chaos: Chaos) -> None:
    """Delay what a worker says and hears, for a while."""
    name = chaos.rng.choice(chaos.wires.names)
    end = chaos.begin("delay", name)
    await chaos.wires.delay(name, chaos.rng.choice([0.005, 0.05, 0.3]))
    await asyncio.sleep(chaos.rng.uniform(0.5, 5.0))
    await chaos.wires.delay(name, 0.0)
    end()


FAULTS: Final[Mapping[Fault, int]] = {kill: 2, stop: 3, cut: 5, partition: 3, delay: 2}
