"""`asyncrpc run`: N processes of one script, which start and end together.

The script needs no change: it finds the same environment as under torchrun, and a
secret.  The state machine of `multiprocessing.launch` decides which failure counts, and
when which process is stopped.  On the terminal come whole lines, each with its rank.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from asyncrpc.clusters.preemption.machine.preempting import EXIT_SAVED
from asyncrpc.core.host.lines import LinePrefixer, prefix_of
from asyncrpc.core.host.run_entry import ENTRY_VARIABLE, RunEntry, record_of
from asyncrpc.core.host.run_places import make_place, places_here
from asyncrpc.core.loop.clock import Clock
from asyncrpc.core.multiprocessing.environment import (
    SECRET_FILE_VARIABLE,
    SECRET_VARIABLE,
    new_secret,
    process_environment,
    threads_each,
)
from asyncrpc.core.multiprocessing.outcome import describe_exit
from asyncrpc.core.multiprocessing.store import serve_store
from asyncrpc.core.multiprocessing.supervisor import (
    GRACE_S,
    Effect,
    Elapsed,
    Event,
    Exited,
    Kill,
    LaunchPhase,
    Reason,
    StopRequested,
    Supervisor,
)
from asyncrpc.errors import UsageError
from asyncrpc.tools.cli.runs.command import now_s
from asyncrpc.tools.cli.runs.listing import sweep


class PrefixingReader(asyncio.Protocol):
    """Copies one pipe to one stream of ours, line by line."""

    def __init__(
        self, prefixer: LinePrefixer, target: BinaryIO, on_end: Callable[[], None]
    ) -> None:
        self._prefixer = prefixer
        self._target = target
        self._on_end = on_end

    def data_received(self, data: bytes) -> None:
        """Write the lines that are complete."""
        self._write(self._prefixer.feed(data))

    def connection_lost(self, exc: Exception | None) -> None:
        """Write the rest."""
        self._write(self._prefixer.flush())
        self._on_end()

    def _write(self, lines: bytes) -> None:
        if lines:
            self._target.write(lines)
            self._target.flush()


INTERRUPT_GRACE_S: Final = 1.0  # after Ctrl-C all processes end within two seconds
_LAST_OUTPUT_S: Final = 0.5  # how long a grandchild may keep our pipes open
_SHELL_SIGNAL: Final = 128  # a shell reports a death by signal n as 128 + n

# Asks the kernel to kill the process when this one dies, then becomes the script.  It
# is a program, and not `preexec_fn`, which runs Python in a fork of a threaded process.
_TIE_TO_PARENT: Final = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)  # PR_SET_PDEATHSIG, SIGKILL
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `asyncrpc run`."""
    parser.description = (
        "Start N processes of a script on this host.  Each finds RANK, WORLD_SIZE, "
        "MASTER_ADDR and the rest as under torchrun, and one secret for all.  The "
        "first failure stops the others, and its exit code is that of asyncrpc run.  "
        "Meanwhile `asyncrpc status`, `why` and the like find its workers without an "
        "address."
    )
    parser.set_defaults(act=_run)
    parser.add_argument("--nproc", type=int, default=1, metavar="N", help="how many")
    parser.add_argument(
        "--threads",
        type=int,
        metavar="T",
        help="threads that torch uses in each (default: an equal share of the cores)",
    )
    parser.add_argument(
        "--grace",
        type=float,
        metavar="S",
        help="seconds from SIGTERM to SIGKILL, for programs that save in between: see"
        " asyncrpc.Preemption (default: 1, and 2 after a failure)",
    )
    parser.add_argument(
        "-m", dest="module", action="store_true", help="TARGET is a module"
    )
    parser.add_argument("target", metavar="TARGET", help="the script")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="...", help="its arguments"
    )


def _run(arguments: argparse.Namespace) -> int:
    target: str = arguments.target
    if arguments.nproc < 1:
        raise UsageError(f"--nproc must be at least 1, not {arguments.nproc}")
    if arguments.grace is not None and not 0 < arguments.grace < math.inf:
        raise UsageError(f"--grace must be positive seconds, not {arguments.grace}")
    if not arguments.module and not Path(target).exists():
        raise UsageError(f"the file {target!r} does not exist; for a module, use -m")
    program = ("-m", target) if arguments.module else (target,)
    command = Command(
        arguments=(*program, *arguments.arguments),
        nprocs=arguments.nproc,
        threads=arguments.threads,
        grace_s=arguments.grace,
    )
    return asyncio.run(run_command(command, os.environ))


@dataclass(frozen=True, slots=True)
class Command:
    """What to run.

    Attributes:
        arguments: of the interpreter: a script, or `-m module`, and its arguments.
        threads: threads in each; None is an equal share of the cores, unless
            OMP_NUM_THREADS is set.
        grace_s: seconds from SIGTERM to SIGKILL; None: enough for a program that saves
            nothing.
    """

    arguments: tuple[str, ...]
    nprocs: int
    threads: int | None = None
    grace_s: float | None = None


async def run_command(command: Command, inherited: Mapping[str, str]) -> int:
    """Run a command in `nprocs` processes until all have ended."""
    store = serve_store()
    secret = inherited.get(SECRET_VARIABLE) or new_secret()
    environments = [
        _environment(command, inherited, rank, store.port, secret)
        for rank in range(command.nprocs)
    ]
    entry = await asyncio.to_thread(_enter, command, inherited, secret)
    try:
        for environment in environments:  # an inherited value belongs to an outer run
            environment[ENTRY_VARIABLE] = str(entry.path) if entry else ""
        return await _LaunchRun(command).until_ended(environments)
    finally:
        if entry is not None:
            await asyncio.to_thread(entry.remove)


def _enter(
    command: Command, inherited: Mapping[str, str], secret: str
) -> RunEntry | None:
    """Make the directory by which commands find the run; None if that fails."""
    path = _secret_file(inherited)
    try:
        record = record_of(
            command.arguments, nprocs=command.nprocs, began_s=now_s(), secret_file=path
        )
        place = make_place(places_here(inherited))
        sweep(place)
        return RunEntry(place, record, None if path else secret)
    except (OSError, UsageError) as error:
        _warn(error)
        return None


def _warn(problem: object) -> None:
    """Warn that the run cannot be found without an address."""
    print(
        f"asyncrpc run: warning: no run directory ({problem}); the program runs "
        "nevertheless, but `asyncrpc status` and the like need the address of a "
        "worker. Set ASYNCRPC_RUN_DIR to another directory",
        file=sys.stderr,
    )


def _secret_file(inherited: Mapping[str, str]) -> str:
    """Return the file from which each process reads the secret; empty: none."""
    if inherited.get(SECRET_VARIABLE):
        return ""
    return inherited.get(SECRET_FILE_VARIABLE) or ""


def _environment(
    command: Command, inherited: Mapping[str, str], rank: int, port: int, secret: str
) -> dict[str, str]:
    variables = process_environment(
        rank=rank, nprocs=command.nprocs, secret=secret, store_port=port
    )
    if _secret_file(inherited):  # each process reads it
        variables = {
            k: v for k, v in variables.items() if not k.startswith(SECRET_VARIABLE)
        }
    threads = str(threads_each(command.nprocs, command.threads, "--threads"))
    if command.threads is None:
        threads = inherited.get("OMP_NUM_THREADS", threads)
    return {
        **inherited,
        **variables,
        "OMP_NUM_THREADS": threads,  # torch reads it, and so does all of OpenMP and MKL
        "PYTHONUNBUFFERED": "1",  # to a pipe, kilobytes of lines would be buffered
    }


class _LaunchRun:
    """One run: feeds the supervisor, and carries out what it decides."""

    def __init__(self, command: Command) -> None:
        self._command = command
        self._is_group = command.nprocs > 1
        grace_s = GRACE_S if command.grace_s is None else command.grace_s
        self._supervisor = Supervisor(command.nprocs, grace_s=grace_s)
        self._clock = Clock()
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._processes: list[Process] = []
        self._exit_codes: dict[int, int] = {}
        self._interrupted_by: signal.Signals | None = None
        self._open_pipes = 0
        self._pipes_ended = asyncio.Event()

    async def until_ended(self, environments: Sequence[Mapping[str, str]]) -> int:
        try:
            with self._signals_heard():
                async with asyncio.TaskGroup() as tasks:
                    for rank, environment in enumerate(environments):
                        await self._start(rank, environment)
                        tasks.create_task(self._wait_for(rank))
                    while self._supervisor.phase is not LaunchPhase.DONE:
                        await self._step()
            await self._drain_pipes()
        finally:
            self._kill_all()
        return self._conclude()

    async def _start(self, rank: int, environment: Mapping[str, str]) -> None:
        argv = [sys.executable, *self._command.arguments]
        if sys.platform == "linux":
            tie = [sys.executable, "-I", "-S", "-c", _TIE_TO_PARENT, str(os.getpid())]
            argv = tie + argv
        if not self._is_group:
            # Alone it keeps our terminal, for input() and pdb.
            process = await asyncio.create_subprocess_exec(*argv, env=environment)
        else:
            stdout, stderr = await self._pipe(rank, 1), await self._pipe(rank, 2)
            try:
                # Each in its own process group: Ctrl-C reaches only this process, and
                # its signals reach also what the script has started.
                process = await asyncio.create_subprocess_exec(
                    *argv,
                    env=environment,
                    stdin=DEVNULL,
                    stdout=stdout,
                    stderr=stderr,
                    process_group=0,
                )
            finally:
                os.close(stdout)
                os.close(stderr)
        self._processes.append(process)

    async def _pipe(self, rank: int, number: int) -> int:
        """Open a pipe whose lines come out on our stream `number`; return its end."""
        stream = sys.stdout if number == 1 else sys.stderr
        target: BinaryIO = stream.buffer
        reading, writing = os.pipe()
        prefixer = LinePrefixer(prefix_of(str(rank), rank, is_coloured=stream.isatty()))
        # Not asyncio's own pipes: with those, a process counts as running as long as
        # one of its children holds them.
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: PrefixingReader(prefixer, target, self._on_pipe_end),
            os.fdopen(reading, "rb", buffering=0),
        )
        self._open_pipes += 1
        return writing

    def _on_pipe_end(self) -> None:
        self._open_pipes -= 1
        if self._open_pipes == 0:
            self._pipes_ended.set()

    async def _wait_for(self, rank: int) -> None:
        exit_code = await self._processes[rank].wait()
        self._exit_codes[rank] = exit_code
        self._events.put_nowait(Exited(rank, exit_code, self._clock.now_s()))

    async def _step(self) -> None:
        event = await self._next_event()
        for effect in self._supervisor.advance(event):
            self._carry_out(effect)

    async def _next_event(self) -> Event:
        wakes_at_s = self._supervisor.wakes_at_s
        left_s = None if wakes_at_s is None else wakes_at_s - self._clock.now_s()
        try:
            async with asyncio.timeout(left_s):
                return await self._events.get()
        except TimeoutError:
            return Elapsed(self._clock.now_s())

    def _carry_out(self, effect: Effect) -> None:
        if isinstance(effect, Kill):
            signum = signal.SIGKILL
        else:
            # Ctrl-C arrives as Ctrl-C, which Python programs clean up after.
            signum = self._interrupted_by or signal.SIGTERM
        for rank in effect.ranks:
            self._send(rank, signum)

    def _send(self, rank: int, signum: signal.Signals) -> None:
        process = self._processes[rank]
        if process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            if self._is_group:
                os.killpg(process.pid, signum)
            else:
                os.kill(process.pid, signum)

    def _kill_all(self) -> None:
        for rank in range(len(self._processes)):
            self._send(rank, signal.SIGKILL)

    async def _drain_pipes(self) -> None:
        if self._open_pipes:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LAST_OUTPUT_S):
                    await self._pipes_ended.wait()

    @contextlib.contextmanager
    def _signals_heard(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        heard = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        for signum in heard:
            loop.add_signal_handler(signum, self._on_signal, signum)
        try:
            yield
        finally:
            for signum in heard:
                loop.remove_signal_handler(signum)

    def _on_signal(self, signum: signal.Signals) -> None:
        is_first = self._interrupted_by is None
        self._interrupted_by = self._interrupted_by or signum
        grace_s = INTERRUPT_GRACE_S if is_first else 0.0  # a second signal: at once
        if self._command.grace_s is not None and signum is not signal.SIGINT:
            grace_s = self._command.grace_s  # schedulers repeat SIGTERM
        self._events.put_nowait(StopRequested(self._clock.now_s(), grace_s))

    def _conclude(self) -> int:
        if set(self._exit_codes.values()) == {EXIT_SAVED}:
            return EXIT_SAVED  # all were told to end, and have saved
        first_failed = self._supervisor.first_failed
        if first_failed is not None:
            exit_code = self._exit_codes[first_failed]
            stopped = "; the others have been stopped" if self._is_group else ""
            how = describe_exit(exit_code)
            print(f"asyncrpc run: rank {first_failed} {how}{stopped}", file=sys.stderr)
            return exit_code if exit_code > 0 else _SHELL_SIGNAL - exit_code
        if self._supervisor.reason is Reason.REQUEST and self._interrupted_by:
            return _SHELL_SIGNAL + self._interrupted_by
        return 0
