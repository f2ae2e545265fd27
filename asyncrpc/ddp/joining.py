"""Uneven inputs: a rank without inputs takes part in the passes of the others.

Source: torch.nn.parallel.DistributedDataParallel.join, torch.distributed.algorithms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Self

import torch

from asyncrpc.ddp.exchange import Exchange
from asyncrpc.ddp.initial import broadcast
from asyncrpc.ddp.reducer import Reducer
from asyncrpc.errors import UsageError
from asyncrpc.serde import words_of


class Join:
    """An async context: a rank that leaves it helps the ranks that are still inside."""

    def __init__(
        self,
        reducer: Reducer,
        state: Callable[[], Mapping[str, torch.Tensor]],
        *,
        divides_by_all: bool,
        throws: bool,
    ) -> None:
        self._reducer = reducer
        self._exchange: Exchange = reducer.exchange
        self._state = state
        self._divides_by_all = divides_by_all
        self._throws = throws
        self._last = 0  # the rank whose parameters have seen every step

    async def __aenter__(self) -> Self:
        """Ask before each pass, from now on, which ranks take part.

        Raises:
            NotStartedError: the worker is not running.
            UsageError: the module is within another `join`, or this is not the worker's
                event loop.
        """
        used = "DistributedDataParallel.join"
        self._exchange.group.parts.check_on_loop(used)
        if self._exchange.join is not None:
            raise UsageError("this module is already within a `join`")
        self._exchange.join = self._present
        self._exchange.divides_by_all = self._divides_by_all
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Take part in the passes of the others, until no rank has an input left."""
        exchange = self._exchange
        try:
            if error is None:
                await self._shadow()
            else:
                exchange.refuse(f"left its `join` with {words_of(error)}")
                exchange.leave()
        finally:
            exchange.join = None
            exchange.divides_by_all = True

    async def _shadow(self) -> None:
        exchange = self._exchange
        exchange.join = self._others
        while True:
            terms = await exchange.enter()
            if not terms.present:
                break
            await self._reducer.shadow(terms)
        # Ranks that left early have not made the last steps.
        state = list(self._state().values())
        await broadcast(exchange.group, state, self._last)

    async def _present(self) -> Sequence[int]:
        return await self._count(is_here=True)

    async def _others(self) -> Sequence[int]:
        return await self._count(is_here=False)

    async def _count(self, *, is_here: bool) -> Sequence[int]:
        """Return the ranks that have an input."""
        group = self._exchange.group
        here = torch.zeros(group.size, dtype=torch.int32, device="cpu")
        here[group.rank] = is_here
        await group.all_reduce(here)
        present = here.nonzero().flatten().tolist()
        if present:
            self._last = present[0]
        if self._throws and 0 < len(present) < group.size:
            gone = next(rank for rank in range(group.size) if rank not in present)
            raise UsageError(
                f"rank {gone} ({group.members[gone]!r}) has no more inputs, and "
                "throw_on_early_termination=True"
            )
        return present
