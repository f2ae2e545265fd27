"""How clusters are described, and how often their workers start again."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

import asyncrpc
from tests.integration.misuse.uses_values import FLAG
from tests.integration.misuse.using import Use, nothing
from tests.integration.misuse.wrong import SECONDS

COUNTS: Final = {"an integer", "an integer of 70 bits"}
DURATIONS: Final = SECONDS - {"none"}

_LIMITS: Final[Mapping[str, Collection[str]]] = {
    "restarts_max": COUNTS,
    "window_s": SECONDS | {"infinite"},
    "backoff_s": DURATIONS,
    "backoff_max_s": DURATIONS,
    "together": FLAG,
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
}
