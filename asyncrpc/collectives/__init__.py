"""Collectives: what all workers of a group do together, as coroutines.

Source: torch.distributed; MPI.
"""

from asyncrpc.collectives.group import Group

__all__ = ["Group"]
