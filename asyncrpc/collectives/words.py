"""How the failure of a collective travels, and what it raises where it arrives."""

from __future__ import annotations

from typing import Any, Final

from asyncrpc.collectives.machine.operations import CollectiveFailure
from asyncrpc.errors import (
    CollectiveError,
    CollectiveTimeoutError,
    GroupChangedError,
    MalformedError,
    RankLostError,
)

SERVICE: Final = "collectives"

_ERRORS: Final[dict[str, type[CollectiveError]]] = {
    cls.code: cls
    for cls in (
        CollectiveError,
        CollectiveTimeoutError,
        GroupChangedError,
        RankLostError,
    )
}


def error_of(failure: CollectiveFailure) -> CollectiveError:
    """Return what a failure raises."""
    cls = _ERRORS.get(failure.code, CollectiveError)
    return cls(failure.problem, ranks=failure.ranks)


def failure_in(words: Any) -> CollectiveFailure | None:
    """Read a failure, or None, from an answer.

    Raises:
        MalformedError: it is neither.
    """
    return None if words is None else required_failure(words)


def required_failure(words: Any) -> CollectiveFailure:
    """Read a failure.

    Raises:
        MalformedError: it is not a failure.
    """
    match words:
        case [str(code), str(problem), [*ranks]]:
            return CollectiveFailure(code, problem, tuple(map(str, ranks)))
    raise MalformedError(f"not a failure of a collective: {words!r}")


def words_for(failure: CollectiveFailure | None) -> list[Any] | None:
    """Return what `failure_in` reads."""
    if failure is None:
        return None
    return [failure.code, failure.problem, list(failure.ranks)]
