"""Where the run directories of a user are, and whether only the user can change them.

Their content is trusted: addresses to connect to, and a secret to prove.  So a
directory must belong to its user and be writable by that user only, and each file that
is read must belong to the user as well.  No symbolic link is followed.

Source: the XDG Base Directory Specification, of XDG_RUNTIME_DIR.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from asyncrpc.errors import UsageError

DIRECTORY_VARIABLE: Final = "ASYNCRPC_RUN_DIR"
SESSION_VARIABLE: Final = "XDG_RUNTIME_DIR"
FILE_BYTES_MAX: Final = 64 << 10  # of a record or a note
_PRIVATE: Final = 0o700
_PRIVATE_FILE: Final = 0o600


class RunPlace(NamedTuple):
    """A directory that may hold run directories.

    Attributes:
        origin: the source of the path, for errors.
    """

    path: Path
    origin: str

    def __str__(self) -> str:
        return str(self.path)


def places(environ: Mapping[str, str], user: int, temporary: Path) -> list[RunPlace]:
    """Return where the runs of a user may be, the best place first.

    A run uses the first that can be written; a search looks in all, for a run may have
    been started without the variables of a session.
    """
    named = environ.get(DIRECTORY_VARIABLE)
    if named:
        # What the user names may be a link; `Path.resolve` raises at a loop of them.
        return [RunPlace(Path(os.path.realpath(named)), DIRECTORY_VARIABLE)]
    session = environ.get(SESSION_VARIABLE) or f"/run/user/{user}"
    return [
        RunPlace(Path(session) / "asyncrpc", SESSION_VARIABLE),
        RunPlace(
            temporary / f"asyncrpc-runs-{user}", "the directory for temporary files"
        ),
    ]


def places_here(environ: Mapping[str, str]) -> list[RunPlace]:
    """Return the directories where this user's runs may be on this host."""
    return places(environ, os.geteuid(), Path(tempfile.gettempdir()))


def problem_of_directory(status: os.stat_result, user: int) -> str | None:
    """Return why a directory cannot hold runs; None: it can.

    Args:
        status: of the directory; of a link, that of the link itself.
    """
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISDIR(status.st_mode):
        return "is not a directory"
    if status.st_uid != user:
        return f"belongs to user {status.st_uid}, not to you (user {user})"
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"has mode {mode:04o}, so that others can write there: chmod 700"
    return None


def trouble_with(place: RunPlace) -> str | None:
    """Return why a place cannot be used, or None."""
    problem = problem_of_directory(place.path.lstat(), os.geteuid())
    return None if problem is None else f"{place} {problem}"


def make_place(choices: list[RunPlace]) -> RunPlace:
    """Return the first place that a run can be written to; make it if needed."""
    problems = []
    for place in choices:
        try:
            is_named = place.origin == DIRECTORY_VARIABLE
            place.path.mkdir(mode=_PRIVATE, parents=is_named, exist_ok=True)
            problem = trouble_with(place)
        except OSError as error:
            problem = f"{place} cannot be made: {error.strerror or error}"
        if problem is None and not os.access(place.path, os.W_OK | os.X_OK):
            problem = f"{place} cannot be written to"
        if problem is None:
            return place
        problems.append(problem)
    raise UsageError("; ".join(problems))


def write_own(path: Path, content: bytes) -> None:
    """Make a file that only this user can read."""
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW
    with os.fdopen(os.open(path, flags, _PRIVATE_FILE), "wb") as file:
        file.write(content)


def read_own(path: Path) -> bytes | None:
    """Return the content of a small file of this user; None if it is another file."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        opened = os.open(path, flags)
    except OSError:
        return None
    try:
        status = os.fstat(opened)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            return None
        text = os.read(opened, FILE_BYTES_MAX + 1)
        return text if len(text) <= FILE_BYTES_MAX else None
    except OSError:
        return None
    finally:
        os.close(opened)
