"""Workers on a Ray cluster: Ray places and supervises them, asyncrpc calls them.

Ray is an extra: `pip install 'asyncrpc-torch[ray]'`.  It is imported when a gang is
entered, not before.
"""

from asyncrpc.ray.actor import GangWorker
from asyncrpc.ray.changes import GangChange, GangChangeKind, GangChanges
from asyncrpc.ray.gang import Gang
from asyncrpc.ray.machine.supervisor import RestartLimits
from asyncrpc.ray.references import StoredValue
from asyncrpc.ray.store import get, put

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
