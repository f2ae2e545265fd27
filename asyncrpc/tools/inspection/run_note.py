"""A worker's note for the `asyncrpc` commands: its name, and where it listens.

What starts a run makes a directory for it and names it in the environment of the
processes; a `ModelHost` has one for its model.  Each worker writes a file there when it
listens, and removes it when it ends, so that the commands need no address.  No worker
depends on its note: if the directory is gone or full, there is no note.

A worker that was killed leaves its note.  So the note holds the process id and its
start time, by which readers skip it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from asyncrpc.core.host.run_entry import ENTRY_VARIABLE, NOTES
from asyncrpc.core.host.run_places import read_own, write_own
from asyncrpc.core.identity import WorkerIdentity
from asyncrpc.core.sidecar import pulse
from asyncrpc.core.worker import Worker

logger = logging.getLogger("asyncrpc")

NOTES_MAX: Final = 4096  # of one run; further files are not read
_ADDRESSES_MAX: Final = 16


class RunNote(NamedTuple):
    """The note of one worker.

    Attributes:
        rank: of the worker; -1: no rank.
        started: when the process started, in the kernel's ticks since boot; 0: unknown.
    """

    name: str
    rank: int
    pid: int
    started: int
    incarnation: int
    addresses: tuple[str, ...]

    def as_json(self) -> str:
        """Return the content of the file."""
        return json.dumps(self._asdict())


def started_at(pid: int) -> int:
    """Return when a process was started, in the kernel's ticks since boot.

    Returns 0 if that is unknown: the process has ended, or this is not Linux.
    """
    try:
        return pulse.started_at(pid)
    except (OSError, IndexError, ValueError):
        return 0


def note_of(worker: Worker | WorkerIdentity, addresses: Sequence[str]) -> RunNote:
    """Return the note of a worker of this process."""
    return RunNote(
        name=worker.name,
        rank=worker.rank,
        pid=os.getpid(),
        started=started_at(os.getpid()),
        incarnation=worker.incarnation,
        addresses=tuple(addresses[:_ADDRESSES_MAX]),
    )


def read_note(text: bytes) -> RunNote | None:
    """Return the note in a file; None if the file is not a note."""
    try:
        fields: Any = json.loads(text)
        return RunNote(
            name=str(fields["name"]),
            rank=int(fields["rank"]),
            pid=int(fields["pid"]),
            started=int(fields["started"]),
            incarnation=int(fields["incarnation"]),
            addresses=tuple(map(str, fields["addresses"])),
        )
    except (ValueError, KeyError, TypeError):
        return None


def entry_in(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the directory of the run that started this process; None if none did."""
    named = environ.get(ENTRY_VARIABLE)
    return Path(named) if named else None


def without_entry(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment for a process that belongs to no run."""
    return {**environ, ENTRY_VARIABLE: ""}


def has_ended(note: RunNote) -> bool:
    """Return whether the process of a worker of this host has ended."""
    if not note.started:  # the start time is unknown
        return pulse.is_gone(note.pid)
    return pulse.state_of(note.pid, note.started) == pulse.GONE


def notes_in(entry: Path) -> Iterator[tuple[Path, RunNote]]:
    """Yield the notes of a run or model, with their files; blocks this thread."""
    with contextlib.suppress(OSError), os.scandir(entry / NOTES) as entries:
        for count, file in enumerate(entries):
            if count >= NOTES_MAX:
                break
            if file.name.endswith(".json"):
                path = Path(file.path)
                note = read_note(read_own(path) or b"")
                if note is not None:
                    yield path, note


class RunNoteFile:
    """The file of one worker's note."""

    def __init__(self, worker: Worker | WorkerIdentity, entry: Path | None) -> None:
        """Prepare the file.

        Args:
            entry: the directory of its run or model; None: it belongs to none.
        """
        self._worker = worker
        self._folder = None if entry is None else entry / NOTES
        self._lock = threading.Lock()
        self._is_removed = False

    @property
    def is_wanted(self) -> bool:
        """Whether the worker belongs to a run or model, which gets the note."""
        return self._folder is not None

    @property
    def _path(self) -> Path:
        assert self._folder is not None
        return self._folder / f"{self._worker.incarnation:016x}.json"

    def write(self, addresses: Sequence[str]) -> None:
        """Write the note, unless it has been removed; blocks this thread."""
        unnamed = self._path.with_suffix(".new")
        with self._lock:
            if self._is_removed:
                return
            try:
                note = note_of(self._worker, addresses)
                write_own(unnamed, note.as_json().encode())
                unnamed.rename(self._path)
            except OSError as error:
                unnamed.unlink(missing_ok=True)
                logger.debug("no note for `asyncrpc run`: %s", error)

    def remove(self) -> None:
        """Remove the note; blocks this thread."""
        with self._lock, contextlib.suppress(OSError):
            self._is_removed = True
            self._path.unlink(missing_ok=True)
