"""The errors that failures of collectives raise."""

from __future__ import annotations

from typing import Final

from asyncrpc.errors import (
    CollectiveError,
    CollectiveTimeoutError,
    GroupChangedError,
    QuorumLostError,
    RankLostError,
)
from asyncrpc.parallel.collectives.machine.operations import CollectiveFailure

_ERRORS: Final[dict[str, type[CollectiveError]]] = {
    cls.code: cls
    for cls in (
        CollectiveError,
        CollectiveTimeoutError,
        GroupChangedError,
        QuorumLostError,
        RankLostError,
    )
}


def error_of(failure: CollectiveFailure) -> CollectiveError:
    """Return the error that a failure raises."""
    cls = _ERRORS.get(failure.code, CollectiveError)
    return cls(failure.problem, ranks=failure.ranks)
