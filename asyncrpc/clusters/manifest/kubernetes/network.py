"""How the pods of a workload find each other, and which pods may connect to them."""

from __future__ import annotations

from asyncrpc.clusters.manifest.kubernetes.pod import Object, metadata, selector
from asyncrpc.clusters.manifest.kubernetes.workload import Workload


def headless_service(workload: Workload) -> Object:
    """Return a headless Service, which gives each pod a name.

    It publishes pods that are not ready: they become ready by finding each other.
    """
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(workload),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": selector(workload),
            "ports": [{"name": "rendezvous", "port": workload.port}],
        },
    }


def network_policy(workload: Workload, *further: Object) -> Object:
    """Return a NetworkPolicy that lets only pods of the workload connect to them.

    The probes of the kubelet come from the pod's own node, which is always allowed.
    """
    members = {"podSelector": {"matchLabels": selector(workload)}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(workload),
        "spec": {
            **members,
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [members]}, *further],
        },
    }
