"""The arguments of every cluster, and the names that its workers may have."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from os import PathLike
from typing import Final, TypeAlias, TypedDict

from asyncrpc import Options
from asyncrpc.clusters.restarts import RestartLimits
from asyncrpc.core.arguments import check_sequence, check_text, wrong
from asyncrpc.errors import UsageError

CodePaths: TypeAlias = str | PathLike[str] | Sequence[str | PathLike[str]]
WORKERS_MAX: Final = 4096
NAME_LENGTH_MAX: Final = 255
NOT_KEPT_BY_SLURM: Final = (
    "keep=True is not for Cluster.slurm, since Slurm ends what a job leaves; start the"
    " workers by a batch job of their own, and attach to them"
)
NOT_KEPT_BY_RAY: Final = "keep=True is not for Cluster.ray: Ray ends what a job leaves"
NOT_OF_OTHERS: Final = (
    "is for the program that has started the workers; this one has attached itself to"
    " them, and can only `end()` workers that were kept"
)


class ClusterSettings(TypedDict, total=False):
    """The arguments of `Cluster` by name, for `Cluster.ssh` and the like."""

    name: str
    names: Sequence[str] | None
    options: Options | None
    restart: RestartLimits | None
    threads: int | None
    start_timeout_s: float
    drain_timeout_s: float
    keep: bool
    code: CodePaths


def check_names(names: Sequence[str], count: int, own: str) -> None:
    """Raise UsageError unless these are new names, and as many as needed."""
    check_sequence("names", names, "a sequence of names, or None")
    for name in names:
        check_text("each of names", name, at_most=NAME_LENGTH_MAX)
    if len(names) != count or len({*names, own}) <= count:
        raise wrong("names", f"{count} different names, none of them {own!r}", names)


def check_place() -> None:
    """Raise UsageError where no cluster can start workers."""
    if sys.platform != "linux":
        raise UsageError(
            "a Cluster needs Linux, whose kernel ends its workers with the program;"
            " elsewhere start workers by `asyncrpc run`"
        )
