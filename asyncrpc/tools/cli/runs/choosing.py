"""Which run a command means, by the list of runs and the arguments."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from asyncrpc.errors import UsageError
from asyncrpc.tools.cli.runs.listing import LiveRun, RunListing
from asyncrpc.tools.cli.table import lines_of
from asyncrpc.tools.inspection.machine.wording import duration

HEADING: Final = ("run", "pid", "age", "workers", "command")
ELSEWHERE: Final = "of another host or container"
_NAMED_MAX: Final = 4  # workers of other groups


def choose(listing: RunListing, wanted: str | None, now_s: float) -> LiveRun:
    """Return the run that is meant.

    Args:
        wanted: the run's name, the beginning of it, or its process id; None: the only
            one of this host.
    """
    if wanted is not None:
        return _named(listing, wanted, now_s)
    here = [run for run in listing.runs if run.is_here]
    if len(here) == 1:
        return here[0]
    if here:
        raise UsageError(
            f"{len(here)} runs of yours are under way; choose one by --run:\n"
            + table_of(here, now_s)
        )
    raise UsageError(nothing_runs(listing))


def _named(listing: RunListing, wanted: str, now_s: float) -> LiveRun:
    runs = listing.runs
    for matches in (
        [run for run in runs if run.id == wanted],
        [run for run in runs if str(run.record.pid) == wanted and run.is_here],
        [run for run in runs if run.id.startswith(wanted)],
    ):
        if len(matches) == 1:
            return matches[0]
        if matches:
            break
    if not runs:
        raise UsageError(f"there is no run {wanted!r}: {nothing_runs(listing)}")
    how_many = "more than one run" if matches else "no run"
    raise UsageError(
        f"--run {wanted!r} names {how_many}; these are under way:\n"
        + table_of(runs, now_s)
    )


def nothing_runs(listing: RunListing) -> str:
    """Return the text for an empty list: the directories read, and what to do."""
    looked_at = ", ".join(map(str, listing.looked_at))
    problems = "".join(f"; {problem}" for problem in listing.problems)
    elsewhere = [run.id for run in listing.runs if not run.is_here]
    besides = ""
    if elsewhere:
        besides = f"; {elsewhere[0]} is {ELSEWHERE}: choose it by --run"
    return (
        f"no run of yours is under way on this host (looked in {looked_at}{problems})"
        f"{besides}.  For a group that neither `asyncrpc run` nor a ModelHost has "
        "started, give the ADDRESS of any worker, as tcp://host:port, or set "
        "ASYNCRPC_ADDRESS"
    )


def others_in(run: LiveRun, incarnations: Collection[int]) -> str:
    """Return a text on the workers of a run that are in another group; empty: none."""
    others = [note for note in run.notes if note.incarnation not in incarnations]
    if not others or run.is_model:  # a model is looked at with its web workers
        return ""
    names = ", ".join(note.name for note in others[:_NAMED_MAX])
    more = len(others) - _NAMED_MAX
    names += f" and {more} more" if more > 0 else ""
    addresses = [note.addresses[0] for note in others if note.addresses]
    how = f"; to look at them: --run {run.id} {addresses[0]}" if addresses else ""
    verb = "workers are" if len(others) > 1 else "worker is"
    return f"{len(others)} {verb} of run {run.id}, but not in this group: {names}{how}"


def rows_of(runs: Sequence[LiveRun], now_s: float) -> list[tuple[str, ...]]:
    """Return runs as a table, with its heading."""
    return [
        HEADING,
        *(
            (
                run.id,
                str(run.record.pid),
                duration(max(0.0, now_s - run.record.began_s)),
                f"{len(run.notes)}/{run.record.nprocs}",
                " ".join(run.record.command)
                if run.is_here
                else f"({ELSEWHERE}: {run.record.host})",
            )
            for run in runs
        ),
    ]


def table_of(runs: Sequence[LiveRun], now_s: float) -> str:
    """Return runs as a table for people."""
    return "\n".join(lines_of(rows_of(runs, now_s)))
