"""How clusters are described: those of the program, and Ray's without a Ray cluster.

The rest is in tests/clusters/ray/misuse.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

import asyncrpc
from asyncrpc import ray
from tests.integration.misuse.using import Use, nothing
from tests.integration.misuse.wrong import SECONDS

COUNTS: Final = {"an integer", "an integer of 70 bits"}
DURATIONS: Final = SECONDS - {"none"}

_LIMITS: Final[Mapping[str, Collection[str]]] = {
    "restarts_max": COUNTS,
    "window_s": SECONDS | {"infinite"},
    "backoff_s": DURATIONS,
    "backoff_max_s": DURATIONS,
}

USES: Final[Mapping[str, Use]] = {
    "Cluster": Use(
        lambda _: asyncrpc.Cluster,
        needs_worker=False,
        fits={
            "workers": {"an integer"},
            "name": {"text", "text with a surrogate"},
            "names": {"none"},
            "options": {"none"},
            "restart": {"none"},
            "threads": {"none", "an integer"},
            "start_timeout_s": DURATIONS,
            "drain_timeout_s": DURATIONS,
            "keep": {"true"},
            "code": {"an empty list"},
        },
        finish=nothing,
    ),
    "RestartLimits": Use(
        lambda _: asyncrpc.RestartLimits, needs_worker=False, fits=_LIMITS
    ),
    "ray.Gang": Use(
        lambda _: ray.Gang,
        needs_worker=False,
        right={"bundles": lambda _: [{"CPU": 1}, {"CPU": 1, "GPU": 0.5}]},
        fits={
            "name": {"text"},
            "names": {"none"},
            "limits": {"none"},
            "worker": {"none"},
            "options": {"none"},
            "runtime_env": {"none", "a map"},  # Ray knows what may be in it
            "start_timeout_s": DURATIONS,
            "drain_timeout_s": DURATIONS,
        },
        says={"bundles": r"\bbundles?\b"},
        finish=nothing,
    ),
}
