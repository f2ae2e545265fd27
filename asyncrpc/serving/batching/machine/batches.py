"""Which requests form the next batch, and when.

A batch is due when a bucket is full, by number or by bytes, or when the oldest request
in it has waited long enough.  While the maximum of batches runs, the next requests
gather, so batches grow with the load.

Source: E. Crankshaw et al., "Clipper: A Low-Latency Online Prediction Serving System",
NSDI 2017, section 4.3 (delayed batching).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from asyncrpc.serving.batching.machine.fair_queue import QueuedRequest
from asyncrpc.serving.batching.machine.overload import QueueLimits, ServiceQueue

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """What makes a batch.

    Attributes:
        max_wait_s: how long the oldest one waits for others.
        max_bytes: of all requests in it; None: no limit.
    """

    max_size: int
    max_wait_s: float
    max_bytes: int | None = None

    def cost_of(self, size_bytes: int) -> float:
        """Return the share of a batch that a request takes, by number or by bytes.

        Source: A. Ghodsi et al., "Dominant Resource Fairness", NSDI 2011.
        """
        share = 1 / self.max_size
        return share if not self.max_bytes else max(share, size_bytes / self.max_bytes)


class BatchQueue(Generic[T]):
    """Requests that wait for a batch."""

    def __init__(self, batch: BatchLimits, limits: QueueLimits) -> None:
        self.queue: ServiceQueue[T] = ServiceQueue(limits)
        self._batch = batch

    def next_batch(
        self, now_s: float, *, is_closing: bool = False
    ) -> list[QueuedRequest[T]]:
        """Take out the requests of the next batch; empty if none is due.

        The caller has dropped the requests that are due to be dropped.
        """
        if not self.queue.rate.has_place:
            return []
        waiting = self.queue.waiting
        due = [
            bucket
            for bucket in waiting.buckets
            if is_closing or self._is_full(bucket) or self._due_s(bucket) <= now_s
        ]
        if not due:
            return []
        batch = self._batch
        return self.queue.take(waiting.leader(due), batch.max_size, batch.max_bytes)

    def wakes_at_s(self) -> float | None:
        """Return when to look again; None: not before something else happens."""
        times = []
        if (drops_at_s := self.queue.drops_at_s) is not None:
            times.append(drops_at_s)
        if self.queue.rate.has_place:
            times += [self._due_s(bucket) for bucket in self.queue.waiting.buckets]
        return min(times, default=None)

    def _is_full(self, bucket: Hashable) -> bool:
        count, nbytes, _ = self.queue.waiting.waiting_in(bucket)
        batch = self._batch
        return count >= batch.max_size or (
            batch.max_bytes is not None and nbytes >= batch.max_bytes
        )

    def _due_s(self, bucket: Hashable) -> float:
        return self.queue.waiting.waiting_in(bucket)[2] + self._batch.max_wait_s
