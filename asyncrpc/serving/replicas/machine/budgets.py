"""Limits the added load of retries and hedged calls to a share of all calls.

Each call pays a share into the budget; each retry takes 1 out of it.  So when all
replicas are overloaded, retries add no more than that share to the load; without a
budget, every call would be made as often as it may be tried.  `per_s` allows retries
also to a program that calls rarely.

Source: Finagle's `RetryBudget` (a share of the requests, and a few a second),
https://twitter.github.io/finagle/guide/Clients.html#retries; gRPC's
`retryThrottling`, https://github.com/grpc/proposal/blob/master/A6-client-retries.md
"""

from __future__ import annotations


class ShareBudget:
    """A share of all calls, saved up to a limit.

    Attributes:
        remaining: how many could be taken at once.
    """

    __slots__ = (
        "_at_s",
        "_most",
        "_per_s",
        "_share",
        "granted",
        "refused",
        "remaining",
    )

    def __init__(
        self, share: float, *, most: float, per_s: float = 0.0, first: float = 0.0
    ) -> None:
        self._share = share
        self._most = most
        self._per_s = per_s
        self._at_s: float | None = None
        self.remaining = first
        self.granted = self.refused = 0

    def pay(self, now_s: float) -> None:
        """Pay in the share of one call."""
        since_s = 0.0 if self._at_s is None else max(now_s - self._at_s, 0.0)
        self._at_s = now_s
        paid = self.remaining + self._share + since_s * self._per_s
        self.remaining = min(paid, self._most)

    def take(self) -> bool:
        """Take 1 out; return whether the balance allowed it."""
        if self.remaining < 1.0:
            self.refused += 1
            return False
        self.remaining -= 1.0
        self.granted += 1
        return True
