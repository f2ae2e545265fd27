"""What may be added to the load: retries and hedged calls, as a share of all calls.

Each call pays a share into the budget, each retry takes one whole out of it.  So when
all replicas are overloaded, retries add that share to the load and no more; without a
budget each call would become as many as it may be tried.  `per_s` lets a program that
calls rarely retry, too.

Source: Finagle's `RetryBudget` (a share of the requests, and a few a second),
https://twitter.github.io/finagle/guide/Clients.html#retries; gRPC's
`retryThrottling`, https://github.com/grpc/proposal/blob/master/A6-client-retries.md
"""

from __future__ import annotations


class ShareBudget:
    """A share of all calls, saved up to a limit.

    Attributes:
        left: how many could be taken at once.
        taken: how many were, ever.
        refused: how many were not, ever.
    """

    __slots__ = ("_at_s", "_most", "_per_s", "_share", "left", "refused", "taken")

    def __init__(
        self, share: float, *, most: float, per_s: float = 0.0, first: float = 0.0
    ) -> None:
        """Begin.

        Args:
            share: what each call pays in.
            most: how much is saved.
            per_s: what each second pays in.
            first: what is there at the beginning.
        """
        self._share = share
        self._most = most
        self._per_s = per_s
        self._at_s: float | None = None
        self.left = first
        self.taken = self.refused = 0

    def pay(self, now_s: float) -> None:
        """Take note of a call."""
        since_s = 0.0 if self._at_s is None else max(now_s - self._at_s, 0.0)
        self._at_s = now_s
        paid = self.left + self._share + since_s * self._per_s
        self.left = min(paid, self._most)

    def take(self) -> bool:
        """Take one out; return whether there was one."""
        if self.left < 1.0:
            self.refused += 1
            return False
        self.left -= 1.0
        self.taken += 1
        return True
