"""What of workers, calls and references is public by its name only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_OF_THE_RUNTIME: Final = "parts of the runtime ask it of the worker"
_MADE_BY_IT: Final = "the runtime makes it; a user is given it"
_WHERE_WORKERS_MEET: Final = "a worker that starts or ends calls it"

LEFT_OUT: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        [
            *("CallFuture.fail", "CallFuture.settle", "CallFuture.succeed"),
            *("NetworkOptions.compression_to", "DeviceOptions.map_to"),
            "Options.with_environment",
        ],
        _OF_THE_RUNTIME,
    ),
    "CallFuture.add_done_callback": "asyncio's own, but for the loop that it checks",
    **dict.fromkeys(
        ["CallFuture", "JoinTokens", "Peer", "PeerGroup", "PreemptionStep"], _MADE_BY_IT
    ),
    **dict.fromkeys(
        [
            *("JoinRendezvous.join", "JoinRendezvous.leave"),
            *("LocalRendezvous.join", "LocalRendezvous.leave"),
            "LocalRendezvous.publish",
        ],
        _WHERE_WORKERS_MEET,
    ),
}
