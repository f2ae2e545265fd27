"""The times of the membership, by the options of the worker."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MembershipTimes:
    """How often a worker compares, and how long it waits for others.

    Attributes:
        heartbeat_s: seconds; a worker compares once in a few heartbeats.
        lost_after_s: seconds without an answer after which a member is lost.
        connect_timeout_s: seconds that a member may take to answer.
    """

    heartbeat_s: float
    lost_after_s: float
    connect_timeout_s: float
