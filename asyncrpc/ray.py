"""Tensors in Ray's object store; `Cluster.ray` starts workers in Ray's bundles.

Ray is an extra: `pip install 'asyncrpc-torch[ray]'`.  It is imported when it is used.
"""

from asyncrpc.clusters.ray.references import StoredValue
from asyncrpc.clusters.ray.store import get, put

__all__ = ["StoredValue", "get", "put"]
