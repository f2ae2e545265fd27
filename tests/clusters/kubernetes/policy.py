"""What a network plugin makes of a NetworkPolicy: rules of the firewall in each pod.

Only what our policies use is here: pods that a label selects, with or without their
namespace, and ports.  The pod's own node, from where the kubelet probes, is always let
in, as Kubernetes guarantees.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from typing import Any, Final

from tests.clusters.kubernetes.cluster import Pod

_TABLE: Final = "table inet networkpolicy"
_CHAIN: Final = "type filter hook input priority 0; policy drop;"


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Return whether a selector matches labels."""
    wanted: Mapping[str, str] = selector["matchLabels"]
    return wanted.items() <= labels.items()


def rules(
    policy: Mapping[str, Any], pods: Sequence[tuple[Pod, Mapping[str, str]]], node: str
) -> str:
    lines = [
        "iif lo accept",
        "ct state established,related accept",
        f"ip saddr {node} accept",
    ]
    for rule in policy["ingress"]:
        ports = ", ".join(str(entry["port"]) for entry in rule.get("ports", ()))
        limit = f" tcp dport {{ {ports} }}" if ports else ""
        for source in rule["from"]:
            lines += [
                f"ip saddr {pod.address}{limit} accept"
                for pod, labels in pods
                if selects(source["podSelector"], labels)
            ]
    body = "\n".join(lines)
    chain = f"chain inward {{\n{_CHAIN}\n{body}\n}}"
    return f"add {_TABLE}\nflush {_TABLE}\n{_TABLE} {{\n{chain}\n}}\n"


def enforce(
    policy: Mapping[str, Any], pods: Sequence[tuple[Pod, Mapping[str, str]]], node: str
) -> None:
    """Let only those in whom a policy names, to each pod that it selects."""
    for pod, labels in pods:
        if selects(policy["podSelector"], labels):
            subprocess.run(
                ["nsenter", "-t", str(pod.host.pid), "-n", "nft", "-f", "-"],  # noqa: S607
                input=rules(policy, pods, node),
                text=True,
                check=True,
            )
