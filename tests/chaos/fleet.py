"""The processes of the chaos suite: started, killed, stopped, and started again."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from tests.chaos.history import START, History
from tests.chaos.log import now_s
from tests.chaos.wires import Wires
from tests.chaos.worker import SAMPLE, Seat, seat_as_text

REPOSITORY: Final = Path(__file__).parents[2]
READY_S: Final = 60.0  # torch is imported by several at once
ANSWER_S: Final = 90.0  # the longest limit of a call, and what follows
LEAVE_S: Final = 20.0  # the drain and what follows
ENDED: Final = "ended"
ERRORS: Final = "stderr.txt"  # of all of them


@dataclass(frozen=True, slots=True)
class Settings:
    """What a run is to be."""

    seconds: float  # how long things are broken
    seed: int  # of the faults and the load
    workers: int  # how many
    wires: str  # `namespaces`, `proxies`, or `auto` for the first that is permitted
    folder: Path  # for the logs; must exist
    is_verbose: bool = False  # whether each fault is named as it comes


@dataclass(eq=False, slots=True)
class Life:
    name: str
    process: asyncio.subprocess.Process
    said: asyncio.Queue[dict[str, Any]] = field(default_factory=asyncio.Queue)
    first: dict[str, Any] = field(default_factory=dict)
    samples: list[dict[str, int]] = field(default_factory=list)

    @property
    def label(self) -> str:
        """Its name and process id, as its logs are called."""
        return f"{self.name}.{self.process.pid}"

    async def read(self) -> None:
        """Take what it says, to its end."""
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            message = json.loads(line)
            if message["what"] == SAMPLE:
                self.samples.append(message)
            else:
                self.said.put_nowait(message)
        self.said.put_nowait({"what": ENDED})

    async def expect(self, what: str, limit_s: float) -> dict[str, Any]:
        """Wait until it says something."""
        async with asyncio.timeout(limit_s):
            while (message := await self.said.get())["what"] != what:
                if message["what"] == ENDED:
                    self.said.put_nowait(message)
                    raise ProcessLookupError(f"{self.label} has ended")
            return message

    def tell(self, command: str) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.write(f"{command}\n".encode())

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, number)


class Fleet:
    """The workers, each in a process, under names that outlive them."""

    def __init__(
        self,
        wires: Wires,
        settings: Settings,
        room: Path,
        history: History,
        options: dict[str, Any],
    ) -> None:
        self.alive: dict[str, Life] = {}  # the process of each name
        self.dead: list[Life] = []  # labels of the processes that were killed
        self.problems: list[str] = []  # what went wrong with processes
        self._wires = wires
        self._folder = settings.folder
        self._seed = settings.seed
        self._room = room
        self._history = history
        self._options = options
        self._strict = list(wires.names[-1:])
        self._starts: defaultdict[str, int] = defaultdict(int)
        self._tasks = asyncio.TaskGroup()
        self._errors = (settings.folder / ERRORS).open("ab")

    async def __aenter__(self) -> Self:
        """Start every worker."""
        await self._tasks.__aenter__()
        await asyncio.gather(*(self._start_first(name) for name in self._wires.names))
        return self

    async def _start_first(self, name: str) -> None:
        end = self._history.begin(START, name, at_s=now_s())
        await self.start(name)
        end(now_s())

    async def __aexit__(self, *_: object) -> None:
        """Kill what is left."""
        for life in self.alive.values():
            if life.process.returncode is None:
                life.signal(signal.SIGKILL)
                await life.process.wait()
        await self._tasks.__aexit__(None, None, None)
        self._errors.close()

    async def start(self, name: str) -> None:
        """Start a worker, for the first time or again, and wait until it runs."""
        self._starts[name] += 1
        where, listen = self._wires.where, self._wires.listen(name)
        seat = Seat(
            name=name,
            where=where,
            listen=listen,
            advertise="" if where[name] == listen else where[name],
            secret="of the chaos suite",
            folder=str(self._folder),
            seed=self._seed_of(name),
            strict=self._strict,
            options=self._options,
        )
        command = (sys.executable, "-m", "tests.chaos.worker", seat_as_text(seat))
        process = await asyncio.create_subprocess_exec(
            *self._wires.command(name),
            *command,
            cwd=REPOSITORY,
            env={
                **os.environ,
                "PYTHONPATH": ".",
                "OMP_NUM_THREADS": "1",
                "TMPDIR": str(self._room),
            },
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=self._errors,
        )
        life = self.alive[name] = Life(name, process)
        self._tasks.create_task(life.read())
        try:
            life.first = await life.expect("ready", READY_S)
        except (TimeoutError, ProcessLookupError) as error:
            self.problems.append(f"{life.label} did not start: {error!r}")

    def _seed_of(self, name: str) -> int:
        numbers = (self._seed, self._wires.names.index(name), self._starts[name])
        return hash(numbers)  # of integers: the same in every process

    async def kill(self, name: str) -> None:
        """Kill a worker's process."""
        life = self.alive.pop(name)
        self.dead.append(life)
        life.signal(signal.SIGKILL)
        await life.process.wait()

    async def ask(self, command: str, answer: str) -> dict[str, dict[str, Any]]:
        """Give every worker a command; return what each answers, by name."""
        lives = list(self.alive.values())
        for life in lives:
            life.tell(command)
        answers = await asyncio.gather(
            *(life.expect(answer, ANSWER_S) for life in lives), return_exceptions=True
        )
        replies = {}
        for life, reply in zip(lives, answers, strict=True):
            if isinstance(reply, BaseException):
                self.problems.append(f"{life.label} on {command!r}: {reply!r}")
            else:
                replies[life.name] = reply
        return replies

    async def leave(self) -> None:
        """Have every worker end in order."""
        lives = list(self.alive.values())
        for life in lives:
            life.tell("leave")
        await self._await_ends(lives)

    async def _await_ends(self, lives: Iterable[Life]) -> None:
        for life in lives:
            try:
                code = await asyncio.wait_for(life.process.wait(), LEAVE_S)
            except TimeoutError:
                self.problems.append(f"{life.label} did not leave in {LEAVE_S:g} s")
                life.signal(signal.SIGKILL)
            else:
                if code:
                    self.problems.append(f"{life.label} left with status {code}")
