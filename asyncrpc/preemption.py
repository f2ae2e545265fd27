"""The announced end of a process: a preemption, or the time limit of its scheduler.

`Preemption` is the service; `machine` decides what happens when.
"""

from asyncrpc.clusters.preemption.service import Preemption, PreemptionStep

__all__ = ["Preemption", "PreemptionStep"]
