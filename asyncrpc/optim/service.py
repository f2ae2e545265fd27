"""The owner's side of distributed optimizers: their local parts, and steps on them.

A step over several owners has two phases.  PREPARE asks each what gradients it has, and
changes nothing: it keeps nothing either, so to abort is to send no COMMIT.  COMMIT
applies them.  With one owner both are one message, `step`.

No lock is held between the two, so two trainers that reach the owners in opposite
orders cannot wait for each other.  None is needed: PREPARE reads the gradients of its
own context, which no other context changes.  What is serialized is each owner's COMMIT,
whole, by the lock that also keeps backward passes off `.grad`.

A COMMIT that has begun is completed: it runs in a thread, which nothing interrupts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from asyncrpc.autograd.service import AutogradService
from asyncrpc.errors import MalformedError, OptimizerError, Outcome, RejectedError
from asyncrpc.ids import ContextId, Incarnation, WorkerId
from asyncrpc.optim.local import (
    Gradients,
    LocalOptimizer,
    check_parameters,
    scale_for,
    squared_norm,
)
from asyncrpc.runtime.worker import Worker

if TYPE_CHECKING:
    from asyncrpc.runtime.links.link import Link

SERVICE: Final = "optim"
Key = tuple[int, int]  # who made it, and its number there: nobody else can name it


class OptimizerService:
    """A `runtime.extensions.Service`."""

    name = SERVICE

    def __init__(self, worker: Worker, autograd: AutogradService) -> None:
        self.worker = worker
        self._autograd = autograd
        self._optimizers: dict[Key, LocalOptimizer] = {}
        self._serial = 0
        self._handlers: dict[str, Callable[..., Coroutine[Any, Any, Any]]] = {
            "create": self._create,
            "step": self._step,
            "prepare": self._prepare,
            "commit": self._commit,
            "add_group": self._add_group,
            "state": self._state,
            "load_state": self._load_state,
            "rates": self._rates,
            "set_rate": self._set_rate,
            "add_scheduler": self._add_scheduler,
            "step_scheduler": self._step_scheduler,
        }

    def next_serial(self) -> int:
        """Return a number for a new optimizer of this worker."""
        self._serial += 1
        return self._serial

    @property
    def optimizers(self) -> int:
        """How many optimizers have a part here."""
        return len(self._optimizers)

    # --- messages (Service) ----------------------------------------------------------

    async def on_request(self, link: Link, method: str, value: Any) -> Any:
        """Answer the maker of an optimizer."""
        return await self.answer(link.peer.incarnation, method, value)

    async def answer(self, maker: Incarnation, method: str, value: Any) -> Any:
        """Do what the maker of an optimizer asks; it may be this worker."""
        handler = self._handlers.get(method)
        if handler is None or type(value) is not list or not value:
            raise MalformedError(f"there is no request {method!r} about optimizers")
        key = (maker, int(value[0]))
        return await handler(key, *value[1:])

    def on_notice(self, link: Link, method: str, value: Any) -> None:
        """Let go of an optimizer whose maker has."""
        if method != "drop":
            raise MalformedError(f"there is no message {method!r} about optimizers")
        self.drop(link.peer.incarnation, int(value))

    def drop(self, maker: Incarnation, serial: int) -> None:
        """Let go of an optimizer."""
        self._optimizers.pop((maker, serial), None)

    def on_peer_lost(self, peer: WorkerId, reason: str) -> None:
        """Let go of what a dead worker made: nobody else can use it."""
        for key in [key for key in self._optimizers if key[0] == peer.incarnation]:
            del self._optimizers[key]

    async def close(self) -> None:
        """Let go of everything."""
        self._optimizers.clear()

    # --- steps -----------------------------------------------------------------------

    async def _step(
        self,
        key: Key,
        context_id: list[int],
        clip_norm: float | None,
        skip_nonfinite: bool,  # noqa: FBT001
        allow_stale: bool,  # noqa: FBT001
    ) -> list[Any]:
        """Prepare and commit in one: all parameters are here."""
        local = self._find(key)
        gathered = await self._gathered(context_id)

        def job() -> list[Any]:
            gradients = local.gradients(gathered)
            needs_norm = clip_norm is not None or skip_nonfinite
            norm = math.sqrt(squared_norm(gradients)) if needs_norm else None
            scale = scale_for(norm, clip_norm, skip_nonfinite=skip_nonfinite)
            if scale is not None:
                local.step(gradients, scale, allow_stale=allow_stale)
            return [len(gradients), norm, scale is not None]

        return await self.worker.run_in_thread(job)

    async def _prepare(
        self,
        key: Key,
        context_id: list[int],
        needs_norm: bool,  # noqa: FBT001
    ) -> list[Any]:
        """Say how many gradients there are, and the square of their norm."""
        gradients = self._find(key).gradients(await self._gathered(context_id))
        if not needs_norm:
            return [len(gradients), None]
        squared = await self.worker.run_in_thread(partial(squared_norm, gradients))
        return [len(gradients), squared]

    async def _commit(
        self,
        key: Key,
        context_id: list[int],
        scale: float,
        allow_stale: bool,  # noqa: FBT001
    ) -> None:
        local = self._find(key)
        gradients = local.gradients(await self._gathered(context_id))
        await self.worker.run_in_thread(
            partial(local.step, gradients, scale, allow_stale=allow_stale)
        )

    async def _gathered(self, context_id: list[int]) -> Gradients:
        creator, serial = context_id
        return await self._autograd.gathered(ContextId(Incarnation(creator), serial))

    # --- everything else -------------------------------------------------------------

    async def _create(
        self,
        key: Key,
        cls: Any,
        groups: list[dict[str, Any]],
        args: list[Any],
        kwargs: dict[str, Any],
    ) -> None:
        self._check(cls)
        local = [await _resolved(group) for group in groups]

        def job() -> LocalOptimizer:
            return LocalOptimizer(
                cls(local, *args, **kwargs), self._autograd.engine.lock
            )

        self._optimizers[key] = await self.worker.run_in_thread(job)

    async def _add_group(self, key: Key, group: dict[str, Any]) -> None:
        local = self._find(key)
        resolved = await _resolved(group)
        await self.worker.run_in_thread(partial(local.add_group, resolved))

    async def _state(self, key: Key) -> dict[str, Any]:
        return await self.worker.run_in_thread(self._find(key).state)

    async def _load_state(self, key: Key, state: dict[str, Any]) -> None:
        await self.worker.run_in_thread(partial(self._find(key).load_state, state))

    async def _rates(self, key: Key) -> list[float]:
        return await self.worker.run_in_thread(self._find(key).learning_rates)

    async def _set_rate(self, key: Key, rate: float, index: int | None) -> None:
        job = partial(self._find(key).set_learning_rate, rate, index)
        await self.worker.run_in_thread(job)

    async def _add_scheduler(
        self, key: Key, cls: Any, args: list[Any], kwargs: dict[str, Any]
    ) -> int:
        self._check(cls)
        job = partial(self._find(key).add_scheduler, cls, args, kwargs)
        return await self.worker.run_in_thread(job)

    async def _step_scheduler(self, key: Key, index: int, args: list[Any]) -> None:
        job = partial(self._find(key).step_scheduler, index, args)
        await self.worker.run_in_thread(job)

    def _check(self, cls: Any) -> None:
        """Refuse to call what peers may not call.

        Raises:
            RejectedError: the policy does not allow it.
        """
        if not self.worker.functions.is_allowed(cls):
            raise RejectedError(
                f"{cls!r:.100} may not be called on this worker, whose policy is "
                'strict; list it in Options.allow, as "torch.optim.*:*"',
                outcome=Outcome.NOT_EXECUTED,
            )

    def _find(self, key: Key) -> LocalOptimizer:
        found = self._optimizers.get(key)
        if found is None:
            raise OptimizerError(
                f"worker {self.worker.name!r} has no part of this optimizer: it was "
                "let go when the connection to the optimizer's maker broke; make a new "
                "one"
            )
        return found


async def _resolved(group: dict[str, Any]) -> dict[str, Any]:
    """Return a group with the parameters themselves in place of references."""
    values = [await rref.to_here() for rref in group["params"]]
    check_parameters(values)
    return {**group, "params": values}
