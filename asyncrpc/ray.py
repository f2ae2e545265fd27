"""Workers on a Ray cluster: Ray places and supervises them, asyncrpc calls them.

Ray is an extra: `pip install 'asyncrpc-torch[ray]'`.  It is imported when a gang is
entered, not before.
"""

from asyncrpc.clusters.ray.actor import GangWorker
from asyncrpc.clusters.ray.changes import GangChange, GangChangeKind, GangChanges
from asyncrpc.clusters.ray.gang import Gang
from asyncrpc.clusters.ray.references import StoredValue
from asyncrpc.clusters.ray.store import get, put
from asyncrpc.clusters.restarts import RestartLimits

__all__ = [
    "Gang",
    "GangChange",
    "GangChangeKind",
    "GangChanges",
    "GangWorker",
    "RestartLimits",
    "StoredValue",
    "get",
    "put",
]
