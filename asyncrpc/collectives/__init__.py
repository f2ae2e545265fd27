"""Collectives: what all workers of a group do together, as coroutines.

Source: torch.distributed; MPI.
"""

from asyncrpc.collectives.elastic_group import ElasticGroup, join_group
from asyncrpc.collectives.group import Group
from asyncrpc.collectives.payload_exchange import rendezvous

__all__ = ["ElasticGroup", "Group", "join_group", "rendezvous"]
