"""What is public around workers by its name, and is not for users to call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_RECORD: Final = "a record that the runtime makes; users read it"
# tests/simulation/test_replicas.py uses them.
_AS_PEER: Final = "checks its arguments as Peer.call does, which it makes"
_OF_PROXY: Final = "called by the connections that go through a proxy"
# tests/clusters/ray/misuse.py uses them wrongly, as it must.
ON_RAY: Final = {
    "ray.get",
    "ray.put",
}

# Each use needs processes; tests/integration/clusters/test_cluster.py has them once.
_OF_CLUSTER: Final = {
    "Cluster.end",
    "Cluster.__aenter__",
    "Cluster.__getitem__",
    "Cluster.changes",
    "Cluster.close",
    "Cluster.dashboard",
    "Cluster.ready",
    "Cluster.resize",
    "Cluster.restart",
    "Cluster.spawn",
    "Cluster.start",
    "Cluster.state",
    "Cluster.stop",
    "Cluster.update_code",
    "ClusterChanges.__anext__",
}

# They describe, and start nothing: tests/unit/clusters/test_settings.py.
_OF_GROUNDS: Final = {
    "Cluster.attach",
    "Cluster.ray",
    "Cluster.slurm",
    "Cluster.ssh",
    "RayOptions",
    "SlurmOptions",
    "SshOptions",
}

# Each use needs objects on workers, and their class decides what is right.
_OF_ACTORS: Final = {
    "Actor.load",
    "Actor.method",
    "Actor.release",
    "Actor.save",
    "Actors.__getitem__",
    "Actors.load",
    "Actors.method",
    "Actors.release",
    "Actors.save",
    "ActorsMethod.__call__",
    "ActorsMethod.as_completed",
    "scatter",
}

# tests/unit/core/trace uses them, wrongly as well.
_OF_TRACE: Final = {
    "trace.EventRing": "the worker makes and calls it",
    "trace.EventRing.newest": "the worker makes and calls it",
    "trace.EventRing.add_sink": "the worker makes and calls it",
    "trace.EventRing.remove_sink": "the worker makes and calls it",
    "trace.FlightRecorder": "the worker makes and calls it",
    "trace.FlightRecorder.subscribe": "the worker makes and calls it",
    "trace.FlightRecorder.close": "the worker makes and calls it",
    "trace.outcome_of": "the worker makes and calls it",
    "trace.call_label": "names what CallServed tells; any number and text will do",
    "trace.Subscription": "made by Worker.subscribe; tests/unit/core/trace",
    "trace.Subscription.take": "made by Worker.subscribe; tests/unit/core/trace",
    "trace.Subscription.__anext__": "made by Worker.subscribe; tests/unit/core/trace",
    "trace.Subscription.close": "made by Worker.subscribe; tests/unit/core/trace",
}

LEFT_OUT: Final[Mapping[str, str]] = {
    **_OF_TRACE,
    **dict.fromkeys(ON_RAY, "needs a Ray cluster: see tests/clusters/ray/misuse.py"),
    **dict.fromkeys(_OF_GROUNDS, "tests/unit/clusters/test_settings.py"),
    **dict.fromkeys(_OF_CLUSTER, "tests/integration/clusters uses them wrongly"),
    **dict.fromkeys(_OF_ACTORS, "tests/integration/clusters uses them wrongly"),
    "Actor": "made by Cluster.spawn",
    "ActorReply": _RECORD,
    "ActorReply.result": _RECORD,
    "Actors": "made by Cluster.spawn",
    "ActorsMethod": "made by Actors.method",
    "CallStats": _RECORD,
    "ClusterChange": _RECORD,
    "CodeUpdate": _RECORD,
    "ClusterChanges": "made by Cluster.changes",
    "ClusterChanges.end": "called by the cluster whose changes they are",
    "ClusterChanges.put": "called by the cluster whose changes they are",
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
    "ray.StoredValue": "made by ray.put",
    "serving.GenerationStats": _RECORD,
    "serving.QueueStats": _RECORD,
    "serving.SequenceModel": "a protocol; see ContinuousBatcher",
    "serving.SequenceModel.enter": "called by a ContinuousBatcher",
    "serving.SequenceModel.leave": "called by a ContinuousBatcher",
    "serving.SequenceModel.step": "called by a ContinuousBatcher",
    "serving.Publication": _RECORD,
    "serving.ReplicaAnswer": _RECORD,
    "serving.ReplicaStatistics": _RECORD,
    "serving.ReplicaStatus": _RECORD,
    "serving.Replicas.answer": _AS_PEER,
    "serving.Replicas.call": _AS_PEER,
    "serving.Replicas.stream": _AS_PEER,
    "serving.RoutedCalls": "made by Replicas.using",
    "serving.RoutedCalls.answer": _AS_PEER,
    "serving.RoutedCalls.call": _AS_PEER,
    "serving.RoutedCalls.stream": _AS_PEER,
    "serving.RoutedCalls.using": "Replicas.using calls it",
    "serving.ServedVersion": _RECORD,
    "serving.ModelHost.__aenter__": "see tests/integration/serving/model_host",
    "serving.ModelHost.wait_ready": "see tests/integration/serving/model_host",
    "serving.WorkerStatus": _RECORD,
    "serving.asgi.AsgiWebSocket.receive": "called by websocket_response",
    "serving.asgi.AsgiWebSocket.send": "called by websocket_response",
    "serving.asgi.WorkerMiddleware.__call__": "called by the server",
    "testing.Proxy.forget": _OF_PROXY,
    "testing.Proxy.pass_on": _OF_PROXY,
    "testing.Proxy.pieces": _OF_PROXY,
    "testing.Proxy.until_due": _OF_PROXY,
}
