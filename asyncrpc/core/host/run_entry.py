"""The directory of one run: made by what starts it, and removed when the run ends.

A run is of `asyncrpc run`, of `launch` or of a `Cluster`; the commands find it here.

    ID/alive       locked as long as the launcher lives; the kernel unlocks it
    ID/run.json    the record of the run
    ID/secret      the secret of the run, mode 0600; absent if the workers read a file
    ID/workers/    a note of each worker, which the worker writes

A lock tells a dead launcher from a live one more reliably than its process id, which
may have been reused.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from asyncrpc.core.host.run_places import (
    RunPlace,
    make_place,
    places_here,
    write_own,
)
from asyncrpc.core.host.this_host import HOST_ID
from asyncrpc.errors import UsageError

logger = logging.getLogger("asyncrpc")

ENTRY_VARIABLE: Final = "ASYNCRPC_RUN_ENTRY"  # tells the processes of the run
LOCK: Final = "alive"
NOTES: Final = "workers"  # the directory of their notes
RECORD: Final = "run.json"
SECRET: Final = "secret"  # noqa: S105  (the name of a file)
UNNAMED: Final = ".new-"  # prefix of a directory that is not ready
_VERSION: Final = 1
_SAME_NAME_MAX: Final = 9  # of other containers, where process ids may be the same
_STEM_MAX: Final = 16  # the name is typed, and a table shows all of it
_PRIVATE_FILE: Final = 0o600
_PRIVATE_DIRECTORY: Final = 0o700


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The record of a run.

    Attributes:
        host_id: of the host and its namespaces; see `asyncrpc.core.host.this_host`.
        command: the script or module, and its arguments.
        folder: where the launcher was started.
        nprocs: how many processes it has started.
        began_s: when it began, in seconds since 1970.
        secret_file: where the workers read their secret; empty: in the directory.
    """

    pid: int
    host: str
    host_id: str
    command: tuple[str, ...]
    folder: str
    nprocs: int
    began_s: float
    secret_file: str = ""

    def as_json(self) -> str:
        """Return the content of the file."""
        return json.dumps({"version": _VERSION, **asdict(self)}, indent=2)


def read_record(text: bytes) -> RunRecord | None:
    """Return the record in a file; None if it is not one of this version."""
    try:
        fields: dict[str, Any] = json.loads(text)
        if fields.pop("version") != _VERSION:
            return None
        record = RunRecord(**fields)
        return RunRecord(
            pid=int(record.pid),
            host=str(record.host),
            host_id=str(record.host_id),
            command=tuple(map(str, record.command)),
            folder=str(record.folder),
            nprocs=int(record.nprocs),
            began_s=float(record.began_s),
            secret_file=str(record.secret_file),
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def record_of(
    command: Sequence[str], *, nprocs: int, began_s: float, secret_file: str
) -> RunRecord:
    """Return the record of a run that this process starts."""
    return RunRecord(
        pid=os.getpid(),
        host=os.uname().nodename,
        host_id=HOST_ID,
        command=tuple(command),
        folder=str(Path.cwd()),
        nprocs=nprocs,
        began_s=began_s,
        secret_file=secret_file and str(Path(secret_file).absolute()),
    )


def id_of(command: Sequence[str], pid: int) -> str:
    """Return the name of a run, as in `train-4711`: its program and process id."""
    words = [word for word in command if word != "-m"]
    stem = Path(words[0]).name.removesuffix(".py") if words else ""
    plain = re.sub(r"[^A-Za-z0-9_.]+", "-", stem).strip("-.")[:_STEM_MAX]
    return f"{plain or 'run'}-{pid}"


class RunEntry:
    """The directory of a run of this process."""

    def __init__(self, place: RunPlace, record: RunRecord, secret: str | None) -> None:
        """Make the directory.

        Args:
            secret: of its workers; None: they read a file.
        """
        unnamed = place.path / f"{UNNAMED}{os.getpid()}-{os.urandom(4).hex()}"
        unnamed.mkdir(mode=_PRIVATE_DIRECTORY)
        self.path = unnamed
        self._locks: list[int] = []
        try:
            self._locks.append(_locked(unnamed / LOCK))
            self._keep_from_cleaners()
            write_own(unnamed / RECORD, record.as_json().encode())
            if secret is not None:
                write_own(unnamed / SECRET, os.fsencode(secret))
            (unnamed / NOTES).mkdir(mode=_PRIVATE_DIRECTORY)
            self.path = _named(unnamed, id_of(record.command, record.pid))
        except BaseException:
            self.remove()
            raise

    def _keep_from_cleaners(self) -> None:
        """Lock the directory: systemd-tmpfiles removes old files without a lock."""
        with contextlib.suppress(OSError):  # not every file system has locks
            held = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self._locks.append(held)
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def remove(self) -> None:
        """Remove the directory with its content.  Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        while self._locks:
            os.close(self._locks.pop())


def enter_run(
    command: Sequence[str], *, nprocs: int, began_s: float, secret: str
) -> RunEntry | None:
    """Make the directory of a run of this program; None if that is impossible.

    Args:
        command: of the program; empty: what Python was started with.
    """
    try:
        record = record_of(
            command or sys.argv, nprocs=nprocs, began_s=began_s, secret_file=""
        )
        return RunEntry(make_place(places_here(os.environ)), record, secret)
    except (OSError, UsageError) as error:
        logger.debug("`asyncrpc status` will not find this run: %s", error)
        return None


def _named(unnamed: Path, name: str) -> Path:
    """Give a directory its name, or the name and a number."""
    for number in range(1, _SAME_NAME_MAX + 1):
        wanted = unnamed.with_name(name if number == 1 else f"{name}.{number}")
        try:
            return unnamed.rename(wanted)
        except OSError:
            if not wanted.exists() or number == _SAME_NAME_MAX:
                raise
    raise AssertionError


def _locked(path: Path) -> int:
    """Return a locked file that gets its name only after it is locked."""
    unnamed = path.with_suffix(".new")
    flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    lock = os.open(unnamed, flags, _PRIVATE_FILE)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        unnamed.rename(path)
    except BaseException:
        os.close(lock)
        raise
    return lock
