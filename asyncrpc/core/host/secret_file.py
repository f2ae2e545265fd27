"""The cluster's secret from a file, which others must not be able to read.

Anyone who knows the secret can run code in every worker.  So a file that others can
read is refused; the error says what to do.  The open file is judged, not its name.

A file of root that a group may read is accepted: Kubernetes mounts secrets so for pods
that run as another user (mode 0440 with `fsGroup`), behind symbolic links that root
owns.  The user's own file must be private to the user: on a cluster's shared home the
group often has all users.
"""

from __future__ import annotations

import os
import stat
from typing import Final

from asyncrpc.errors import UsageError

SECRET_BYTES_MAX: Final = 4096  # 64 suffice; more is another file by mistake
_ROOT: Final = 0
_PRIVATE: Final = "chmod 600 {path}"


def read_secret(path: str, source: str) -> bytes:
    """Return the secret in a file, without the line's end.

    Args:
        path: of the file; links are followed.
    """
    try:
        # A pipe would block without O_NONBLOCK; it is refused below.
        opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{source}: cannot read the secret in {path!r}: {error}; make it with"
            " `(umask 077; openssl rand -hex 32 > FILE)` where every worker can read it"
        ) from error
    try:
        problem = problem_of(os.fstat(opened), os.geteuid())
        if problem is not None:
            raise UsageError(f"{source}: {path!r} {problem.format(path=path)}")
        secret = os.read(opened, SECRET_BYTES_MAX + 1).rstrip(b"\r\n")
    finally:
        os.close(opened)
    if not secret or len(secret) > SECRET_BYTES_MAX:
        raise UsageError(
            f"{source}: {path!r} must hold a secret of 1 to {SECRET_BYTES_MAX} bytes"
        )
    return secret


def problem_of(status: os.stat_result, user: int) -> str | None:
    """Return why a file cannot hold a secret; None: it can."""
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISREG(status.st_mode):
        return "must be a regular file"
    if status.st_uid not in {user, _ROOT}:
        return f"belongs to user {status.st_uid}, who then knows the secret; copy it"
    if mode & (stat.S_IRWXO | stat.S_IWGRP):
        return (
            f"has mode {mode:04o}, so that others know or choose the secret: "
            f"`{_PRIVATE}`; in Kubernetes set the volume's defaultMode to 0400"
        )
    if mode & stat.S_IRGRP and status.st_uid != _ROOT:
        return f"has mode {mode:04o}, so that its group knows the secret: `{_PRIVATE}`"
    return None
