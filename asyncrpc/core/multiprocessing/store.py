"""The rendezvous store of one host, served by the process that starts the others.

No child serves it, so no child must outlive the rest, and the port is known before the
first one starts: it is bound here and never released, so it cannot be taken in between.

It listens on loopback only.  torch's default is every interface, and the store
authenticates no client.
"""

from __future__ import annotations

import socket

from torch.distributed import TCPStore  # type: ignore[attr-defined]


def serve_store() -> TCPStore:
    """Serve a store on a free port of 127.0.0.1, until the object is deleted."""
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    return TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),  # the store closes it
    )
