"""Checks of versions, of the event loop, of threads and of times."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import zip_longest
from typing import Final

from asyncrpc.tools.checkup.machine.facts import (
    LibraryFacts,
    LoopFacts,
    ThreadFacts,
    TimeoutFacts,
    VersionFacts,
)
from asyncrpc.tools.checkup.machine.findings import CheckFinding, note, ok, wrong

_CONDITION: Final = re.compile(r"\s*(>=|<=|==|!=|~=|>|<)\s*([0-9][^\s,]*)\s*")
UVLOOP: Final = "uvloop"


def meets(version: str, wanted: str) -> bool:
    """Return whether a version meets conditions such as `>=2.6,<3`.

    Only numbers count: `2.13.0+cpu` and `2.13.0rc1` are 2.13.0.  An unknown condition
    counts as met.
    """
    ours = _numbers(version)
    for part in wanted.split(","):
        condition = _CONDITION.fullmatch(part)
        if condition is not None and not _holds(
            ours, condition[1], _numbers(condition[2])
        ):
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    leading = re.match(r"[0-9]+(?:\.[0-9]+)*", version)
    return tuple(map(int, leading[0].split("."))) if leading else ()


def _holds(ours: tuple[int, ...], sign: str, theirs: tuple[int, ...]) -> bool:
    pairs = list(zip_longest(ours, theirs, fillvalue=0))
    left, right = [number for number, _ in pairs], [number for _, number in pairs]
    if sign == "~=":
        most = len(theirs) - 1
        return left >= right and left[:most] == right[:most]
    return {
        ">=": left >= right,
        "<=": left <= right,
        "==": left == right,
        "!=": left != right,
        ">": left > right,
        "<": left < right,
    }[sign]


def check_versions(facts: VersionFacts) -> Iterator[CheckFinding]:
    """Check the interpreter, torch and the packages that asyncrpc requires."""
    yield ok("asyncrpc", facts.asyncrpc)
    if meets(facts.python, facts.python_wanted):
        yield ok("Python", facts.python)
    else:
        advice = f"asyncrpc asks for Python {facts.python_wanted}: install that"
        yield wrong("Python", facts.python, advice)
    for library in facts.libraries:
        if library.version or not library.extra:
            yield _check_library(library, facts.built_with)
    missing = [
        library for library in facts.libraries if library.extra and not library.version
    ]
    if missing:
        names = ", ".join(f"{library.name} [{library.extra}]" for library in missing)
        yield ok("extras", f"not installed: {names}")


def _check_library(library: LibraryFacts, built_with: tuple[str, ...]) -> CheckFinding:
    # A package index may have no newer version for this platform.
    install = f"pip install '{library.name}{library.wanted}'"
    if not library.version:
        if library.name == UVLOOP:
            return note(
                library.name, "not installed", f"calls are slower without it: {install}"
            )
        return wrong(library.name, "not installed", install)
    observation = library.version
    if library.name == "torch" and built_with:
        observation = f"{observation}, built with {', '.join(built_with)}"
    if meets(library.version, library.wanted):
        return ok(library.name, observation)
    return wrong(
        library.name, observation, f"asyncrpc asks for {library.wanted}: {install}"
    )


def check_loop(facts: LoopFacts) -> Iterator[CheckFinding]:
    """Check which event loop runs."""
    if facts.is_debug:
        yield note(
            "event loop",
            f"{facts.kind} in debug mode",
            "debug mode makes each call several times slower: unset "
            "PYTHONASYNCIODEBUG, and do not pass debug=True",
        )
    elif facts.kind == UVLOOP or not facts.has_uvloop:
        yield ok("event loop", facts.kind)
    else:
        yield note(
            "event loop",
            f"{facts.kind}, though uvloop is installed",
            "start the program by asyncrpc.run(main()) instead of asyncio.run(main()), "
            "or pass loop_factory=uvloop.new_event_loop: calls take less time",
        )


def check_threads(facts: ThreadFacts) -> Iterator[CheckFinding]:
    """Check whether the threads of all workers here have processors to run on."""
    here = max(1, facts.workers_here)
    room = facts.cores
    limit = f"{facts.cores} cores"
    if facts.quota_cores is not None and facts.quota_cores < facts.cores:
        room = max(1, int(facts.quota_cores))
        limit = f"{facts.quota_cores:g} of {facts.cores} cores by the cgroup's quota"
    each = max(1, room // here)
    workers = f"{here} workers x " if here > 1 else ""
    observation = f"torch {workers}{facts.torch_threads}, plain functions "
    observation += f"{facts.pool_threads}, {limit}"
    if facts.torch_threads > each:
        yield note(
            "threads",
            observation,
            f"more threads of torch than cores slow each other: OMP_NUM_THREADS={each}"
            + (f" (it is {facts.omp})" if facts.omp else "")
            + ", or torch.set_num_threads",
        )
    elif facts.cores < here:
        yield note(
            "threads",
            observation,
            "workers that share a core answer late: start fewer, or give them more",
        )
    else:
        yield ok("threads", observation)


def check_timeouts(facts: TimeoutFacts) -> Iterator[CheckFinding]:
    """Report the timeouts of a worker."""
    call = "no limit" if facts.call is None else f"{facts.call:g} s"
    stall = "not logged" if facts.stall_after is None else f"{facts.stall_after:g} s"
    yield ok(
        "time-outs",
        f"call {call}, start {facts.rendezvous:g} s, lost peer {facts.lost_after:g} s,"
        f" stall {stall}",
    )
