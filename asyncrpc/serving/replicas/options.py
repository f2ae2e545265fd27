"""Options for how calls are spread over replicas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from asyncrpc.core.arguments import check_count, check_duration, is_seconds, wrong


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaOptions:
    """How `Replicas` spreads calls.

    Raises:
        UsageError: a field has the wrong type, or is out of range.

    Attributes:
        attempts_max: how often a call is made at most; hedged calls do not count.
        retry_share: retries when replicas are overloaded or lost, as a share of all
            calls; one retry a second is allowed in addition.
        hedge_quantile: a call of an idempotent function that takes longer than this
            quantile of the latest 500 to 1,000 calls of the function is made once
            more, on another replica; the first answer counts.  None: never.
        hedge_share: hedged calls, as a share of all calls, at most.
        eject_after: failures in a row after which a replica gets no calls for a while;
            0: it always gets calls.
        eject_s: seconds that this lasts the first time; the n-th time n times as long,
            but at most ten times.
        eject_share: share of the replicas that may be left out at the same time; one
            always may, if there are others.
        warm_s: seconds in which the share of a replica that has just become ready
            grows from a tenth to the whole; 0: it gets its whole share at once.
        key_load_max: a call with a key goes to the next replica of the key if the load
            of its own exceeds this multiple of the mean; None: it never does.
        ready_timeout_s: seconds that a call waits for a replica if none is ready.
    """

    attempts_max: int = 3
    retry_share: float = 0.2
    hedge_quantile: float | None = 0.95
    hedge_share: float = 0.05
    eject_after: int = 5
    eject_s: float = 10.0
    eject_share: float = 0.3
    warm_s: float = 5.0
    key_load_max: float | None = None
    ready_timeout_s: float = 5.0

    def __post_init__(self) -> None:
        check_count("attempts_max", self.attempts_max, at_least=1)
        _check_share("retry_share", self.retry_share)
        _check_share("hedge_share", self.hedge_share)
        _check_share("eject_share", self.eject_share)
        if self.hedge_quantile is not None:
            _check_share("hedge_quantile", self.hedge_quantile, more=", or None")
        check_count("eject_after", self.eject_after)
        check_duration("eject_s", self.eject_s)
        check_duration("warm_s", self.warm_s)
        check_duration("ready_timeout_s", self.ready_timeout_s)
        least = self.key_load_max
        if least is not None and not (is_seconds(least) and least >= 1):
            raise wrong("key_load_max", "a number of at least 1, or None", least)


def _check_share(name: str, value: Any, *, more: str = "") -> None:
    if not is_seconds(value) or not 0 <= value <= 1:
        raise wrong(name, f"a number from 0 to 1{more}", value)
