"""Messages that are no records: what a peer may send all the same."""

from __future__ import annotations

import asyncio
from typing import Any

from asyncrpc.core.services.ports import PeerLink
from asyncrpc.core.wire.frames import pack_head


class RawMessage:
    """Any content for any method of any service."""

    labels = ()
    may_wait_s = 0.0

    def __init__(self, service: Any, method: Any, content: Any) -> None:
        self.service, self.method, self.name = service, method, f"{service}.{method}"
        self.head = pack_head([service, method])
        self._content = content

    def pack(self) -> Any:
        return self._content


def tell(link: PeerLink, service: Any, method: Any, content: Any) -> None:
    """Send a notice."""
    notice: Any = RawMessage(service, method, content)
    link.tell(notice)


def request(
    link: PeerLink, service: Any, method: Any, content: Any
) -> asyncio.Future[Any]:
    """Send a request; the future holds its answer as it travels."""
    asked: Any = RawMessage(service, method, content)
    return link.ask(asked)
