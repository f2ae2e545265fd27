"""What is public around workers by its name, and is not for users to call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_RECORD: Final = "a record that the runtime makes; users read it"
_OF_PROXY: Final = "called by the connections that go through a proxy"
# What needs a Ray cluster.
_ELSEWHERE: Final = {
    "ray.Gang": "tests/clusters/ray",
    "ray.Gang.__aenter__": "tests/clusters/ray",
    "ray.Gang.changed": "tests/clusters/ray",
    "ray.Gang.changes": "tests/clusters/ray",
    "ray.Gang.peer": "tests/clusters/ray",
    "ray.get": "tests/clusters/ray",
    "ray.put": "tests/clusters/ray",
}

LEFT_OUT: Final[Mapping[str, str]] = {
    **{name: f"see {where}" for name, where in _ELSEWHERE.items()},
    "CallStats": _RECORD,
    "Counters": _RECORD,
    "ElasticGroup": "made by join_group",
    "GroupCall": "made by PeerGroup.call",
    "GroupReply": _RECORD,
    "MemberChange": _RECORD,
    "MemberChanges": "made by Worker.members_changed",
    "MemberChanges.end": "called by the worker whose members they are",
    "MemberChanges.put": "called by the worker whose members they are",
    "RRef.made_on": "called by optimizers",
    "RRefRecord": _RECORD,
    "multiprocessing.Processes": "made by multiprocessing.launch",
    "ray.GangChange": _RECORD,
    "ray.GangChanges": "made by Gang.changes",
    "ray.GangChanges.__anext__": "takes no argument",
    "ray.GangChanges.end": "called by the gang whose changes they are",
    "ray.GangChanges.put": "called by the gang whose changes they are",
    "ray.GangWorker": "made by the gang",
    "ray.StoredValue": "made by ray.put",
    "serving.WorkerStatus": _RECORD,
    "testing.Proxy.forget": _OF_PROXY,
    "testing.Proxy.pass_on": _OF_PROXY,
    "testing.Proxy.pieces": _OF_PROXY,
    "testing.Proxy.until_due": _OF_PROXY,
}
