"""Several workers that do the same, called as one, and the state that they report."""

from asyncrpc.serving.replicas.call import ReplicaAnswer
from asyncrpc.serving.replicas.options import ReplicaOptions
from asyncrpc.serving.replicas.replica import Replica, drain
from asyncrpc.serving.replicas.replicas import (
    Replicas,
    ReplicaStatistics,
    ReplicaStatus,
    RoutedCalls,
)

__all__ = [
    "Replica",
    "ReplicaAnswer",
    "ReplicaOptions",
    "ReplicaStatistics",
    "ReplicaStatus",
    "Replicas",
    "RoutedCalls",
    "drain",
]
