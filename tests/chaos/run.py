"""One run of the chaos suite, from the first process to the verdict."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from asyncrpc import LivenessOptions, NetworkOptions
from asyncrpc.testing.leaks import child_processes
from tests.chaos.faults import Chaos
from tests.chaos.fleet import ERRORS, Fleet, Settings
from tests.chaos.history import History
from tests.chaos.log import now_s, read_all
from tests.chaos.losses import judge_losses
from tests.chaos.mistakes_made import Mistakes, count_mistakes
from tests.chaos.verdict import Verdict, judge_calls, judge_holdings, judge_memory
from tests.chaos.wires import Namespaces, Proxies, Wires

LOST_AFTER_S: Final = 6.0
# A peer may have been silent for a heartbeat before a fault begins.
SILENCE_S: Final = LOST_AFTER_S - LivenessOptions().heartbeat_s
WARM_UP_S: Final = 2.0
REST_S: Final = (
    4.0  # after the last call: what is late comes, what is free is given back
)
OPTIONS: Final = {"drain_timeout_s": 3.0, "lost_after_s": LOST_AFTER_S}
NAMES: Final = "abcdefgh"
FAULTS: Final = "faults.txt"
UNHANDLED: Final = ("Exception in callback", "Task exception was never")
SHARED_MEMORY: Final = Path("/dev") / "shm"


@dataclass(frozen=True, slots=True)
class Report:
    settings: Settings
    wires: str
    lacking: frozenset[str]
    injected: Counter[str]
    lives: int
    calls: int
    mistakes: Mistakes
    took_s: float
    verdict: Verdict


async def go(settings: Settings) -> Report:
    """Run it.

    Raises:
        OSError: namespaces were asked for and are not permitted.

    Cancellation:
        Processes, proxies and namespaces are ended.
    """
    with tempfile.TemporaryDirectory(prefix="chaos-") as room:
        return await _go(settings, Path(room))


async def _go(settings: Settings, room: Path) -> Report:
    """Run it; all that the workers put into a temporary directory is in `room`."""
    before, begun_s = left_behind(room), now_s()
    verdict = Verdict()
    history = History(silence_s=SILENCE_S, dial_s=NetworkOptions().connect_timeout_s)
    async with (
        await choose(settings.wires, NAMES[: settings.workers]) as wires,
        Fleet(wires, settings, room, history, OPTIONS) as fleet,
    ):
        chaos = Chaos(fleet, wires, settings.seed, history, lost_after_s=LOST_AFTER_S)
        await _break(settings, fleet, chaos)
        await _end(fleet, history, verdict)
    lives = [*fleet.dead, *fleet.alive.values()]
    for life in lives:
        judge_memory(life.label, life.samples, verdict)
    verdict.others += [*fleet.problems, *unhandled(settings.folder / ERRORS)]
    story = read_all(settings.folder, {life.label for life in fleet.dead})
    verdict.others += story.findings
    judge_calls(story.calls, verdict)
    verdict.losses = judge_losses(story, history)
    (settings.folder / FAULTS).write_text("\n".join(history.lines()), encoding="utf-8")
    verdict.leaks += _left(before, left_behind(room), killed=len(fleet.dead))
    return Report(
        *(settings, wires.kind, Wires.faults - wires.faults, chaos.injected),
        *(len(lives), len(story.calls), count_mistakes(story)),
        *(now_s() - begun_s, verdict),
    )


def _left(before: list[str], after: list[str], *, killed: int) -> list[str]:
    """Return what is new.

    A process that was killed leaves its private folder: nobody is there to remove it.
    """
    new = [trace for trace in after if trace not in before]
    folders = [trace for trace in new if trace.startswith(tempfile.gettempdir())]
    return [trace for trace in new if trace not in folders or len(folders) > killed]


async def choose(wanted: str, names: str) -> Wires:
    """Return the wires that are wanted, or the best that are permitted."""
    if wanted == "proxies":
        return Proxies(names)
    if wanted == "namespaces" or await Namespaces.are_permitted():
        return Namespaces(names)
    return Proxies(names)


async def _break(settings: Settings, fleet: Fleet, chaos: Chaos) -> None:
    begun_s = now_s()

    def said(what: str) -> None:
        if settings.is_verbose:
            at_s = now_s() - begun_s
            print(f"{at_s:8.1f} s  {what}", file=sys.stderr, flush=True)

    await asyncio.sleep(WARM_UP_S)
    await chaos.run(settings.seconds, said)
    await asyncio.sleep(WARM_UP_S)


async def _end(fleet: Fleet, history: History, verdict: Verdict) -> None:
    """Have the workers finish, say what they have left, and leave."""
    await fleet.ask("finish", "finished")
    # Only now does nobody hand on a reference any more.
    await fleet.ask("let go", "let go")
    await asyncio.sleep(REST_S)
    last = await fleet.ask("report", "left")
    first = {name: fleet.alive[name].first for name in last}
    judge_holdings(first, last, verdict)
    history.left_s = now_s()
    await fleet.leave()


def unhandled(errors: Path) -> list[str]:
    """Return what the workers' loops could not hand to anybody, each text once."""
    lines = errors.read_text(encoding="utf-8", errors="replace").splitlines()
    counter = Counter(
        line.partition(" at 0x")[0] for line in lines if line.startswith(UNHANDLED)
    )
    return [f"{count} times: {line}" for line, count in counter.items()]


def left_behind(room: Path) -> list[str]:
    """Return what the workers could leave on this host."""
    leftovers = [str(path) for path in SHARED_MEMORY.glob("asyncrpc*")]
    leftovers += [str(path) for path in room.iterdir()]
    leftovers += [f"process {pid}: {what}" for pid, what in child_processes().items()]
    return sorted(leftovers)
