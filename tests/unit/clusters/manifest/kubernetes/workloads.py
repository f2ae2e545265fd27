"""Workloads of the tests."""

from __future__ import annotations

from typing import Any

from asyncrpc.clusters.manifest.kubernetes.workload import (
    PodProbe,
    ProbeKind,
    Resources,
    Workload,
)


def small(**fields: Any) -> Workload:
    """Return a workload that has only what it must have."""
    values: dict[str, Any] = {
        "name": "trainer",
        "image": "registry.example/trainer:1",
        "command": ("python", "train.py"),
        "workers": 4,
    }
    return Workload(**(values | fields))


def full(**fields: Any) -> Workload:
    """Return a workload that has everything."""
    resources = Resources(cpu="4", memory="16Gi", shared_memory="2Gi", gpus=2)
    values: dict[str, Any] = {
        "namespace": "research",
        "secret": "shared-secret",
        "resources": resources,
        "probe": PodProbe(ProbeKind.HTTP, 8080),
        "grace_s": 60,
        "pre_stop_s": 5,
        "restarts": 2,
        "environment": {"LEARNING_RATE": "0.1", "PATTERN": "$(HOME)"},
        "user": 1000,
    }
    return small(**(values | fields))
