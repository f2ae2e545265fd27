"""Explains what a backward pass waits for, on all workers."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from asyncrpc.core.autograd.messages import AskWaits
from asyncrpc.core.autograd.state import Pass
from asyncrpc.core.ids import WorkerId
from asyncrpc.core.links.directory import Directory
from asyncrpc.errors import MalformedError

EXPLAIN_S: Final = 1.0  # for the answers of the others


class PassWaits:
    """Explains what a pass waits for, here and on the workers that were asked."""

    def __init__(self, me: WorkerId, directory: Directory) -> None:
        self._me = me
        self._directory = directory

    async def explain(self, backward_pass: Pass, path: list[int]) -> list[str]:
        """Return a line for each cause of waiting.

        Args:
            path: the workers that ask one another; no worker is asked twice.
        """
        lines = self._waits_here(backward_pass)
        here = [*path, self._me.incarnation]
        asked = {}
        for peer in backward_pass.onward.values():
            link = self._directory.link_of(peer.incarnation)
            if link is not None and peer.incarnation not in here:
                asked[peer.name] = link.ask(AskWaits(backward_pass.ids, here))
        try:
            if asked:
                await asyncio.wait(asked.values(), timeout=EXPLAIN_S / (1 + len(path)))
        finally:
            for call in asked.values():
                call.cancel()  # does nothing after the answer
        for to, call in asked.items():
            answered = _lines_in(call, to)
            if answered is None:
                answered = [f"worker {to!r} does not answer {self._me.name!r}"]
            lines += answered
        return list(dict.fromkeys(lines))

    def _waits_here(self, backward_pass: Pass) -> list[str]:
        name = self._me.name
        lines = []
        if backward_pass.wave.is_running:
            lines.append(f"worker {name!r} runs its part of the graph")
        for message, position in backward_pass.machine.waits_for:
            sent = backward_pass.state.sent.get(message)
            to = "" if sent is None else f" to {sent.to.name!r}"
            lines.append(
                f"worker {name!r} waits for the gradient of tensor {position} of "
                f"message {message.serial}{to}"
            )
        return lines


def _lines_in(call: asyncio.Future[Any], peer: str) -> list[str] | None:
    """Return the lines in a worker's answer about its waits; None without answer."""
    if not call.done() or call.cancelled() or call.exception() is not None:
        return None
    try:
        return AskWaits.read_answer(peer, call.result())
    except MalformedError:
        return None
