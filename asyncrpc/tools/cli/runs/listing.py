"""The runs of a user that are under way, and the removal of dead ones."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from asyncrpc.core.host.run_entry import (
    LOCK,
    RECORD,
    SECRET,
    UNNAMED,
    RunRecord,
    read_record,
)
from asyncrpc.core.host.run_places import (
    RunPlace,
    problem_of_directory,
    read_own,
    trouble_with,
)
from asyncrpc.core.host.this_host import HOST_ID
from asyncrpc.core.members import Member
from asyncrpc.core.sidecar import pulse
from asyncrpc.extend import Incarnation
from asyncrpc.serving.model_host.slot import FOLDER, ModelSlot
from asyncrpc.tools.inspection.run_note import RunNote, has_ended, notes_in

RUNS_MAX: Final = 1000  # of one directory; further ones are not read


@dataclass(frozen=True, slots=True)
class LiveRun:
    """A run of `asyncrpc run` that is under way, or the model of a `ModelHost`.

    Attributes:
        record: of the run; for a model, of its process without its web workers.
        notes: of its listening workers, by rank; on this host, only of live ones.
    """

    path: Path
    record: RunRecord
    notes: tuple[RunNote, ...]
    is_model: bool = False

    @property
    def id(self) -> str:
        """Its name."""
        return self.path.name

    @property
    def is_here(self) -> bool:
        """Whether this host runs it, and not another host or container."""
        return self.record.host_id == HOST_ID

    @property
    def secret_path(self) -> Path | None:
        """The file of its secret; None: its workers have no secret."""
        if self.record.secret_file:
            return Path(self.record.secret_file)
        own = self.path / SECRET
        return own if own.exists() else None


@dataclass(slots=True)
class RunListing:
    """The runs found in all directories.

    Attributes:
        runs: the runs under way, the oldest first.
        problems: why directories were skipped.
    """

    runs: list[LiveRun] = field(default_factory=list)
    looked_at: list[RunPlace] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def list_runs(choices: Sequence[RunPlace]) -> RunListing:
    """List the runs under way, and remove the directories of dead ones."""
    listing = RunListing(looked_at=list(choices))
    for place in choices:
        try:
            problem = trouble_with(place)
        except OSError:  # the directory does not exist
            continue
        if problem is not None:
            listing.problems.append(problem)
            continue
        listing.runs += _runs_in(place.path)
        listing.runs += _models_in(place.path / FOLDER)
    listing.runs.sort(key=lambda run: run.record.began_s)
    return listing


def sweep(place: RunPlace) -> None:
    """Remove the directories that dead runs have left."""
    for path in _directories(place.path):
        is_alive(path)


def _runs_in(place: Path) -> Iterator[LiveRun]:
    for path in _directories(place):
        if path.name.startswith(UNNAMED) or not is_alive(path):
            continue
        record = read_record(read_own(path / RECORD) or b"")
        if record is not None:
            is_here = record.host_id == HOST_ID
            yield LiveRun(path, record, _notes(path, is_here=is_here))


def _models_in(place: Path) -> Iterator[LiveRun]:
    """Find the models whose process listens; keep the directories of the others."""
    for path in _directories(place):
        note = ModelSlot(path).look().note
        if note is None:
            continue
        notes = _notes(path, is_here=note.host_id == HOST_ID)
        record = RunRecord(
            pid=note.pid,
            host=note.host,
            host_id=note.host_id,
            command=("ModelHost", note.function),
            folder=note.folder,
            nprocs=len(notes),
            began_s=note.began_s,
            secret_file=str(path / SECRET),
        )
        # All web workers know the model, and no other web worker.
        notes = tuple(
            sorted(notes, key=lambda web_worker: web_worker.pid != record.pid)
        )
        yield LiveRun(path, record, notes, is_model=True)


def _directories(place: Path) -> Iterator[Path]:
    with suppress(OSError), os.scandir(place) as entries:
        for count, entry in enumerate(entries):
            if count >= RUNS_MAX:
                return
            with suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                if problem_of_directory(status, os.geteuid()) is None:
                    yield Path(entry.path)


def is_alive(path: Path) -> bool:
    """Return whether the launcher of a run is alive; if not, remove the directory."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        lock = os.open(path / LOCK, flags)
    except OSError:  # the run is being made or removed, or this is not a run
        return False
    with closing(os.fdopen(lock, "rb+", buffering=0)):
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        with suppress(OSError):  # if another process checks it, that one removes it
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        return False


def _notes(entry: Path, *, is_here: bool) -> tuple[RunNote, ...]:
    notes = [note for _, note in notes_in(entry) if not (is_here and has_ended(note))]
    return tuple(sorted(notes, key=lambda note: (note.rank, note.name)))


def users_of(run: LiveRun) -> list[Member]:
    """Return the users of a model, including its own worker; empty for a run.

    They are not members of its group: each knows the model, and no other user.
    """
    if not (run.is_model and run.is_here):
        return []
    return [
        Member(
            note.name, note.rank, Incarnation(note.incarnation), note.addresses, HOST_ID
        )
        for note in _notes(run.path, is_here=True)
    ]


def is_stopped(note: RunNote) -> bool:
    """Return whether a signal has stopped a worker's process on this host."""
    return pulse.state_of(note.pid, note.started) == pulse.STOPPED
