"""Arguments of one call to several peers, encoded once if nothing forbids it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from asyncrpc.core.serde import Encoded
from asyncrpc.errors import EncodeError

RunOnHost = Callable[[Callable[[], Encoded]], "asyncio.Future[Encoded]"]


class CommonArguments:
    """Arguments of one call to several peers, encoded once if possible.

    Attributes:
        encodings: the message for all peers, by codec ("" is none); empty if messages
            differ, or are not known yet.
    """

    __slots__ = ("_packings", "encodings", "value")

    def __init__(self, value: tuple[list[Any], dict[str, Any]]) -> None:
        self.value = value
        self.encodings: dict[str, Encoded] = {}
        self._packings: dict[str, asyncio.Future[Encoded]] = {}

    def packed(
        self, run_on_host: RunOnHost, codec: str, encoded: Encoded
    ) -> Awaitable[Encoded]:
        """Pack encoded arguments in a thread; common ones are packed only once."""
        packing = self._packings.get(codec)
        if packing is not None:
            return _again(packing)
        packing = run_on_host(encoded.pack)
        if codec not in self.encodings:
            return packing
        self._packings[codec] = packing
        return asyncio.shield(packing)


async def _again(packing: asyncio.Future[Encoded]) -> Encoded:
    """Wait for what is packed for another peer, and is counted there."""
    try:
        return replace(await asyncio.shield(packing), bytes_copied=0)
    except EncodeError as error:  # each call has its own, which names it
        raise EncodeError(error.problem, outcome=error.outcome) from error
