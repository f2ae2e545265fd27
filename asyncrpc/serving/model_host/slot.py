"""The slot of a model process: the directory by which its web workers find it.

    lock        locked by the process that has been started, from before its first
                instruction to its end; the kernel unlocks it
    note.json   its identity, and where it listens; written once it listens
    secret      proved by the process and its web workers; mode 0600
    workers/    notes of its worker and of the workers of its web workers, by which
                `asyncrpc status` and the other commands find them

The lock decides which web worker starts the process, and tells a dead process from a
live one, as process ids are reused.  The web worker that takes the lock passes it on,
still locked, to the process that it starts.  So a second process can never be started,
even if the first web worker is killed in between.

A slot belongs to a name, a function and its file, an interpreter and a host, so that
two applications of one user do not share it by accident.  The directory stays when the
process has ended: its web workers may wait for the next one, and know the secret.

Everything here blocks the calling thread.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import secrets
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Self

from asyncrpc.core.host.run_entry import NOTES
from asyncrpc.core.host.run_places import make_place, places_here, read_own, write_own
from asyncrpc.core.host.secret_file import read_secret
from asyncrpc.core.host.this_host import HOST_ID
from asyncrpc.errors import UsageError
from asyncrpc.tools.inspection.run_note import has_ended, notes_in

FOLDER: Final = "models"  # of all slots, in the directory of the user's runs
_STEM_MAX: Final = 16  # for people, in a listing
_KEY_CHARACTERS: Final = 12
_SECRET_BYTES: Final = 32
_TRIES: Final = 16  # to lock a file that is replaced meanwhile
_PRIVATE_FILE: Final = 0o600
_PRIVATE_DIRECTORY: Final = 0o700


@dataclass(frozen=True, slots=True)
class SlotNote:
    """The note of a model process.

    Attributes:
        generation: identifies the process; drawn anew for each.
        pid: of the process, for people.
        folder: where it was started.
        host_id: of the host and its namespaces; see `asyncrpc.core.host.this_host`.
        began_s: when it began, in seconds since 1970.
        is_ending: whether it accepts no more web workers.
    """

    generation: str
    pid: int
    addresses: tuple[str, ...]
    function: str
    folder: str
    host: str
    host_id: str
    began_s: float
    is_ending: bool = False

    def as_json(self) -> bytes:
        """Return the content of the file."""
        return json.dumps(asdict(self)).encode()


def read_slot_note(text: bytes | None) -> SlotNote | None:
    """Return the note in a file; None if it is not one."""
    try:
        fields: Any = json.loads(text or b"")
        return SlotNote(
            generation=str(fields["generation"]),
            pid=int(fields["pid"]),
            addresses=tuple(map(str, fields["addresses"])),
            function=str(fields["function"]),
            folder=str(fields["folder"]),
            host=str(fields["host"]),
            host_id=str(fields["host_id"]),
            began_s=float(fields["began_s"]),
            is_ending=bool(fields["is_ending"]),
        )
    except (ValueError, KeyError, TypeError):
        return None


@dataclass(frozen=True, slots=True)
class Sighting:
    """The observed state of a slot.

    Attributes:
        is_held: whether a process has the slot, or is being started in it.
        note: of that process; None: it does not listen yet.
    """

    is_held: bool
    note: SlotNote | None


class ModelSlot:
    """The slot of one model on this host."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def of(
        cls,
        name: str,
        function: str,
        file: str,
        environ: Mapping[str, str] = os.environ,
    ) -> Self:
        """Return the slot of a model; make its directory if it does not exist."""
        place = make_place(places_here(environ))
        identity = [name, function, file, sys.prefix, HOST_ID]
        key = hashlib.sha256("\0".join(identity).encode()).hexdigest()[:_KEY_CHARACTERS]
        stem = re.sub(r"[^A-Za-z0-9_]+", "-", name)[:_STEM_MAX]
        slot = cls(place.path / FOLDER / f"{stem}-{key}")
        try:
            slot.make()
        except OSError as error:
            raise UsageError(
                f"cannot make {str(slot.path)!r}: {error.strerror or error}; "
                "set ASYNCRPC_RUN_DIR to another directory"
            ) from error
        return slot

    def make(self) -> None:
        """Make the directory, unless it exists."""
        for path in (self.path, self.path / NOTES):
            path.mkdir(mode=_PRIVATE_DIRECTORY, parents=True, exist_ok=True)

    @property
    def _lock_path(self) -> Path:
        return self.path / "lock"

    @property
    def _note_path(self) -> Path:
        return self.path / "note.json"

    # --- the lock --------------------------------------------------------------------

    def try_lock(self) -> int | None:
        """Take the slot; return the locked file, or None if a process has it.

        The note of a process that has died is removed.
        """
        self.make()
        flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        for _ in range(_TRIES):
            lock = os.open(self._lock_path, flags, _PRIVATE_FILE)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                return None
            if self._is_at_its_path(lock):
                self._note_path.unlink(missing_ok=True)
                return lock
            os.close(lock)  # it was removed, and perhaps made anew, in between
        raise OSError(f"{self._lock_path} was removed during all {_TRIES} attempts")

    def _is_at_its_path(self, lock: int) -> bool:
        try:
            return os.fstat(lock).st_ino == self._lock_path.stat().st_ino
        except FileNotFoundError:
            return False

    def look(self) -> Sighting:
        """Return the state of the slot, and change nothing."""
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            lock = os.open(self._lock_path, flags)
        except OSError:
            return Sighting(is_held=False, note=None)
        try:
            # A process that tries to take it at this moment tries again.
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return Sighting(is_held=True, note=self.note())
        finally:
            os.close(lock)
        return Sighting(is_held=False, note=None)

    # --- the files -------------------------------------------------------------------

    def note(self) -> SlotNote | None:
        """Return the note of the listening process; None if no process listens."""
        return read_slot_note(read_own(self._note_path))

    def write_note(self, note: SlotNote) -> None:
        """Replace the note; only for the holder of the lock."""
        unnamed = self.path / f"note.{note.generation}"
        write_own(unnamed, note.as_json())
        unnamed.rename(self._note_path)

    def remove_note(self) -> None:
        """Remove the note; only for the holder of the lock."""
        with contextlib.suppress(OSError):
            self._note_path.unlink(missing_ok=True)

    def keep_fresh(self) -> None:
        """Make the files look used, as cleaners remove old temporary files.

        The notes of web workers that were killed are removed.
        """
        for path, note in notes_in(self.path):
            if has_ended(note):
                path.unlink(missing_ok=True)
        for path in (self.path, *self.path.rglob("*")):
            with contextlib.suppress(OSError):
                os.utime(path, follow_symlinks=False)

    def secret(self) -> bytes:
        """Return the secret of the slot; draw it if the slot has none yet."""
        path = self.path / "secret"
        if not path.exists():
            unnamed = self.path / f"secret.{secrets.token_hex(4)}"
            try:
                write_own(unnamed, secrets.token_hex(_SECRET_BYTES).encode())
                with contextlib.suppress(FileExistsError):  # another process was first
                    os.link(unnamed, path)
            except OSError as error:
                raise UsageError(f"cannot write {str(path)!r}: {error}") from error
            finally:
                unnamed.unlink(missing_ok=True)
        return read_secret(str(path), "the secret of a ModelHost")
