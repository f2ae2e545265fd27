"""The end of a process that its scheduler announces: a preemption, or the time limit.

`Preemption` is the service; `machine` decides what is done when.
"""

from asyncrpc.preemption.service import Preemption

__all__ = ["Preemption"]
