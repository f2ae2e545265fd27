"""Uneven inputs: a rank without inputs takes part in what the others do together.

Before each pass, and before each step that waits for all ranks, the ranks tell each
other who is there, and for what.  So a rank that has left knows what to take part in,
whatever the order of passes and steps is.

Source: torch.distributed.algorithms.Join and Joinable.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Final, Self

import torch

from asyncrpc.core.arguments import check_flags, listed, wrong
from asyncrpc.core.serde import words_of
from asyncrpc.core.torch_modes import plain_steps
from asyncrpc.errors import UsageError
from asyncrpc.parallel.ddp.exchange import Exchange
from asyncrpc.parallel.ddp.initial import broadcast
from asyncrpc.parallel.ddp.reducer import Reducer

_WANTED: Final = (
    "a DistributedDataParallel, ZeroRedundancyOptimizer or PostLocalSGDOptimizer"
)


class Joinable:
    """The part of a module or an optimizer that a `Join` uses.

    Attributes:
        shadow: takes part in a step of the ranks that have inputs; None: this has no
            steps, or nobody can take part in them.
        reducer: of a module; None for an optimizer.
        state: returns what all ranks of a module have alike.
        announce: tells the ranks of a `Join` that this one begins a step; None: not
            within a `Join`.
    """

    def __init__(
        self,
        shadow: Callable[[], Awaitable[Any]] | None = None,
        reducer: Reducer | None = None,
        state: Callable[[], Mapping[str, torch.Tensor]] = dict,
    ) -> None:
        self.shadow = shadow
        self.reducer = reducer
        self.state = state
        self.announce: Callable[[], Awaitable[Sequence[int]]] | None = None

    def check(self, operation: str) -> None:
        """Refuse a step that a rank without inputs would not take part in."""
        if self.announce is None and _ACTIVE.get() is not None:
            raise UsageError(
                f"{operation} waits for all ranks, and a rank that has no more inputs "
                "would not come: use `async with Join([model, optimizer])`"
            )

    async def begin(self) -> None:
        """Tell the ranks of the `Join`, if this is within one, that a step begins."""
        if self.announce is not None:
            await self.announce()


class Join:
    """An async context: a rank that leaves it helps the ranks that are still inside.

    A rank that reaches the end takes part with zeros in the backward passes of the
    others, and in the steps of the given optimizers, until all have reached it; then
    all get the parameters of a rank that was there to the last, and its buffers unless
    `broadcast_buffers` is off.  Every rank must use it.

    Example:
        >>> async with Join([model, optimizer]):
        ...     for inputs in my_batches:
        ...         optimizer.zero_grad()
        ...         await model.backward(model(inputs).mean())
        ...         await optimizer.step()

    Source: torch.distributed.algorithms.Join; unlike there, passes and steps may come
    in any order that is the same at all ranks with inputs.
    """

    def __init__(
        self,
        joinables: Iterable[Any],
        *,
        divide_by_initial_world_size: bool = True,
        throw_on_early_termination: bool = False,
    ) -> None:
        """Prepare a loop; nothing is sent.

        Args:
            joinables: the `DistributedDataParallel` modules of the loop, and the
                optimizers whose steps wait for other ranks, the same at all ranks.
            divide_by_initial_world_size: the mean of gradients is over all ranks; else
                over the ranks that have inputs.
            throw_on_early_termination: the first rank without inputs ends the loop for
                all, with an error.

        Raises:
            UsageError: no module is given, one of `joinables` cannot be joined, or an
                option is not a bool.
        """
        check_flags(
            divide_by_initial_world_size=divide_by_initial_world_size,
            throw_on_early_termination=throw_on_early_termination,
        )
        self._parts = [
            _joinable(f"joinables[{index}]", part)
            for index, part in enumerate(listed("joinables", joinables, "a list"))
        ]
        self._reducers = [
            part.reducer for part in self._parts if part.reducer is not None
        ]
        if not self._reducers:
            raise UsageError("joinables must contain a DistributedDataParallel")
        self._divides_by_all = divide_by_initial_world_size
        self._throws = throw_on_early_termination
        self._last = 0  # the rank whose parameters have seen every step
        self._outer: Join | None = None

    @property
    def _exchange(self) -> Exchange:
        return self._reducers[0].exchange

    async def __aenter__(self) -> Self:
        """Ask before each pass and step, from now on, which ranks take part.

        Raises:
            NotStartedError: the worker is not running.
            UsageError: a module is within another `join`, or this is not the worker's
                event loop.
        """
        self._exchange.group.host.check_on_loop("Join")
        if any(part.announce is not None for part in self._parts):
            raise UsageError("this module is already within a `join`")
        for number, part in enumerate(self._parts, 1):
            part.announce = functools.partial(self._count, number)
            if part.reducer is not None:
                part.reducer.exchange.join = part.announce
                part.reducer.exchange.divides_by_all = self._divides_by_all
        self._outer = _ACTIVE.get()
        _ACTIVE.set(self)
        return self

    @plain_steps
    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Take part in what the others do, until no rank has an input left."""
        _ACTIVE.set(self._outer)
        for part in self._parts:
            part.announce = None
        try:
            if error is None:
                await self._shadow()
            else:
                for reducer in self._reducers:
                    reducer.exchange.refuse(f"left its `join` with {words_of(error)}")
                    reducer.exchange.leave()
        finally:
            for reducer in self._reducers:
                reducer.exchange.join = None
                reducer.exchange.divides_by_all = True

    async def _shadow(self) -> None:
        while (doing := await self._tell(0)).any():
            part = self._parts[self._check(doing) - 1]
            if part.reducer is not None:
                await self._shadow_pass(part.reducer, doing)
            else:
                assert part.shadow is not None  # or it could not be joined
                await part.shadow()
        # Ranks that left early have not made the last steps.
        for part in self._parts:
            if part.reducer is not None:
                group = part.reducer.exchange.group
                await broadcast(group, list(part.state().values()), self._last)

    async def _shadow_pass(self, reducer: Reducer, doing: torch.Tensor) -> None:
        async def present() -> Sequence[int]:
            return _ranks_in(doing)

        reducer.exchange.join = present
        terms = await reducer.exchange.enter()
        # A step of a joined optimizer needs the gradients that all ranks have.
        has_optimizer = len(self._parts) > len(self._reducers)
        await reducer.shadow(terms, keeps_gradients=has_optimizer)

    async def _count(self, number: int) -> Sequence[int]:
        """Tell the others what begins here; return the ranks that have an input."""
        doing = await self._tell(number)
        self._check(doing)
        return _ranks_in(doing)

    async def _tell(self, number: int) -> torch.Tensor:
        """Return what each rank begins, by number of its part; 0: it has no input."""
        exchange = self._exchange
        group = exchange.meet()
        doing = torch.zeros(group.size, dtype=torch.int32, device="cpu")
        doing[group.rank] = number
        try:
            return await group.all_reduce(doing)
        except BaseException:
            exchange.leave()
            raise

    def _check(self, doing: torch.Tensor) -> int:
        """Return the number of the part that all ranks with inputs begin."""
        present = _ranks_in(doing)
        self._last = present[-1]
        numbers: list[int] = doing.tolist()
        if problem := self._problem(numbers, present):
            self._exchange.leave()
            raise UsageError(problem)
        return numbers[present[0]]

    def _problem(self, numbers: Sequence[int], present: Sequence[int]) -> str:
        """Return the text of the error that all ranks raise; empty: all is well."""
        if len(present) < len(numbers) and self._throws:
            gone = numbers.index(0)
            name = self._exchange.group.members[gone]
            return (
                f"rank {gone} ({name!r}) has no more inputs, and "
                "throw_on_early_termination=True"
            )
        first = present[0]
        for rank in present:
            if numbers[rank] != numbers[first]:
                return (
                    "passes and steps within a join must come in the same order at all "
                    f"ranks, but rank {first} begins a step of joinables["
                    f"{numbers[first] - 1}], and rank {rank} of joinables["
                    f"{numbers[rank] - 1}]"
                )
        return ""


_ACTIVE: Final[ContextVar[Join | None]] = ContextVar("asyncrpc.ddp.join", default=None)


def _joinable(name: str, part: object) -> Joinable:
    joinable = getattr(part, "_joinable", None)
    if not isinstance(joinable, Joinable) or (
        joinable.shadow is None and joinable.reducer is None
    ):
        raise wrong(name, _WANTED, part)
    return joinable


def _ranks_in(doing: torch.Tensor) -> Sequence[int]:
    ranks: list[int] = doing.nonzero().flatten().tolist()
    return ranks
