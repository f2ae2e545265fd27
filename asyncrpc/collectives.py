"""Collectives: what all workers of a group do together, as coroutines.

Source: torch.distributed; MPI.
"""

from asyncrpc.parallel.collectives.elastic_group import ElasticGroup, join_group
from asyncrpc.parallel.collectives.group import Group
from asyncrpc.parallel.collectives.payload_exchange import rendezvous

__all__ = ["ElasticGroup", "Group", "join_group", "rendezvous"]
