"""The record of a cluster whose workers outlive their program, by which it is found.

    NAME/record.json   secret and addresses of its workers, mode 0600
    NAME/w0.log        what the worker w0 prints once it may outlive its program

It lies in `clusters` of the directory in which `asyncrpc run` keeps its runs; logs of
workers on another host lie there.  Everything here may block for a moment.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from asyncrpc import JoinRendezvous
from asyncrpc.core.arguments import check_texts, wrong
from asyncrpc.core.host.run_places import (
    DIRECTORY_VARIABLE,
    make_place,
    places_here,
    read_own,
    write_own,
)
from asyncrpc.errors import ClusterError

_FOLDER: Final = "clusters"
_RECORD: Final = "record.json"
_VERSION: Final = 1
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}", re.ASCII)
_PRIVATE: Final = 0o700
_PRIVATE_FILE: Final = 0o600


@dataclass(frozen=True, slots=True)
class KeptCluster:
    """The record.

    Attributes:
        addresses: of its workers, by name.
        secret: hexadecimal digits; not shown in any text.
    """

    name: str
    addresses: Mapping[str, tuple[str, ...]]
    secret: str = field(repr=False)


def check_name(name: str) -> None:
    """Raise UsageError unless a name can be that of a directory."""
    if not _NAME.fullmatch(name):
        wanted = "up to 64 letters, digits and `_.-` for a cluster that is kept"
        raise wrong("name", wanted, name)


def directory_of(name: str) -> Path:
    """Return the directory of a cluster; it may not exist."""
    return make_place(places_here(os.environ)).path / _FOLDER / name


def claim(name: str) -> None:
    """Make the directory of a new cluster; ClusterError: there is one of this name."""
    path = directory_of(name)
    path.parent.mkdir(mode=_PRIVATE, exist_ok=True)
    try:
        path.mkdir(mode=_PRIVATE)
    except FileExistsError:
        raise ClusterError(
            f"a cluster {name!r} has been kept: `asyncrpc.Cluster.attach({name!r})`"
            f" joins it, and its `end()` ends it; if none of its workers is left,"
            f" remove {path}"
        ) from None


def write_record(record: KeptCluster) -> None:
    """Write the record of a cluster, in place of an earlier one.

    ClusterError: it cannot be written.
    """
    path = directory_of(record.name) / _RECORD
    unnamed = path.with_name(f".new-{os.getpid()}")
    content = {"version": _VERSION, **asdict(record)}
    try:
        unnamed.unlink(missing_ok=True)
        write_own(unnamed, json.dumps(content).encode())
        unnamed.rename(path)
    except OSError as error:
        raise ClusterError(
            f"the record of a kept cluster cannot be written to {path}:"
            f" {error.strerror}; {DIRECTORY_VARIABLE} names another directory"
        ) from error


def read_record(name: str) -> KeptCluster:
    """Return the record of a cluster; ClusterError: there is none."""
    path = directory_of(name) / _RECORD
    record = _parsed(read_own(path) or b"")
    if record is None:
        raise ClusterError(
            f"no cluster {name!r} has been kept on this host by this user: {path} is"
            " not there, or is not a record of this version"
        )
    return record


def contact_of(where: str | Sequence[str]) -> str | tuple[str, ...]:
    """Return the name of a kept cluster, or addresses; UsageError: it is neither."""
    if isinstance(where, str) and "://" not in where:
        check_name(where)
        return where
    addresses = (where,) if isinstance(where, str) else where
    check_texts("where", addresses, at_least=1)
    return tuple(JoinRendezvous(addresses).addresses)


def read_contact(name: str) -> tuple[list[str], tuple[str, ...], bytes]:
    """Return names and addresses of the workers of a kept cluster, and its secret."""
    record = read_record(name)
    addresses = tuple(x for several in record.addresses.values() for x in several)
    if not addresses:
        raise ClusterError(f"the kept cluster {name!r} has no worker yet")
    return [*record.addresses], addresses, bytes.fromhex(record.secret)


def _parsed(text: bytes) -> KeptCluster | None:
    try:
        fields: Any = json.loads(text)
        if fields["version"] != _VERSION:
            return None
        addresses = {
            str(worker): tuple(map(str, where))
            for worker, where in fields["addresses"].items()
        }
        return KeptCluster(str(fields["name"]), addresses, str(fields["secret"]))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def remove(name: str) -> None:
    """Remove the directory of a cluster.  Idempotent."""
    shutil.rmtree(directory_of(name), ignore_errors=True)


def log_of(cluster: str, worker: str) -> int:
    """Return a descriptor of the file that a worker prints to from now on."""
    path = directory_of(cluster)
    path.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
    plain = re.sub(r"[^A-Za-z0-9_.-]", "_", worker).lstrip(".") or "worker"
    flags = os.O_CREAT | os.O_APPEND | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW
    return os.open(path / f"{plain}.log", flags, _PRIVATE_FILE)
