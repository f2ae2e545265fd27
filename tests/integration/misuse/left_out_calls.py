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
            *("Worker.add_service", "Worker.admit", "Worker.begin", "Worker.describe"),
            *("Worker.check_loop", "Worker.check_on_loop", "Worker.check_running"),
            "Worker.end_in_child",
            *("Worker.connect_and_start", "Worker.hello", "Worker.is_known"),
            *("Worker.link_to", "Worker.meta_here", "Worker.mode_of_method"),
            *("Worker.new_call", "Worker.on_loop_thread", "Worker.on_peer_back"),
            *("Worker.on_peer_lost", "Worker.on_served", "Worker.random_bytes"),
            *("Worker.run_in_thread", "Worker.run_on_host", "Worker.service"),
            *("Worker.start_call", "Worker.start_eagerly", "Worker.start_remote"),
            *("Worker.start_task", "Worker.target"),
            *("CallFuture.fail", "CallFuture.settle", "CallFuture.succeed"),
            *("Options.compression_to", "Options.device_map_to"),
            "Options.with_environment",
        ],
        _OF_THE_RUNTIME,
    ),
    **dict.fromkeys(["CallFuture", "Peer", "PeerGroup"], _MADE_BY_IT),
    **dict.fromkeys(
        [
            *("JoinRendezvous.join", "JoinRendezvous.leave"),
            *("LocalRendezvous.join", "LocalRendezvous.leave"),
            "LocalRendezvous.publish",
        ],
        _WHERE_WORKERS_MEET,
    ),
}
