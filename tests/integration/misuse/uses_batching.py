"""How queues of requests are used: batches, sequences, limits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from asyncrpc import serving
from tests.integration.misuse.beside import giving
from tests.integration.misuse.uses_values import CALLABLES, FLAG
from tests.integration.misuse.using import ANYTHING, Use, nothing
from tests.integration.misuse.wrong import SECONDS, World

COUNTS: Final = {"an integer", "an integer of 70 bits"}
DURATIONS: Final = SECONDS - {"none"}
ANY_CALLABLE: Final = CALLABLES | {"a local function", "raises in everything"}
UNHASHABLE: Final = {
    *("an empty list", "a list of numbers", "a list of text", "a map", "too deep"),
    *("raises in __hash__", "raises in everything", "raises in __eq__"),
}
# Of all queues.  One batch of one item may be anything that can be iterated over once.
QUEUES: Final[Mapping[str, Any]] = {
    "waiting_max": COUNTS,
    "max_queue_age_s": SECONDS,
    "overflow": (),
    "priority_step_s": DURATIONS,
    "name": {"none", "text"},
}
WARM_UP: Final = {"an empty list", "too deep", "too many dimensions"}
REQUEST: Final[Mapping[str, Any]] = {
    "priority": {"an integer", "a negative integer"},
    "client": ANYTHING - UNHASHABLE | {"raises in __eq__"},
}


async def _give_back_all(items: list[Any]) -> Any:
    return items


class OneStep:
    """A model whose sequences have one item each."""

    def enter(self, requests: list[Any]) -> list[Any]:
        return [[request] for request in requests]

    def step(self, states: list[Any]) -> list[Any]:
        return [(state, True) for state in states]

    def leave(self, state: Any) -> None:
        """Keep nothing."""


async def _batcher(world: World) -> None:
    """Keep a batcher that has been entered; it has nothing to close."""
    if "batcher" not in world.kept:
        batcher = serving.Batcher(_give_back_all, 1, 0.0)
        world.kept["batcher"] = await batcher.__aenter__()


async def _generate(world: World) -> list[Any]:
    """Generate with a batcher that is entered for it."""
    batcher: serving.ContinuousBatcher[Any, Any, Any]
    async with serving.ContinuousBatcher(OneStep(), 1, in_thread=False) as batcher:
        return [item async for item in batcher.generate(1)]


class _Entered:
    """A generation by a batcher that is entered for it."""

    async def generate(
        self, request: Any, *, priority: Any = 0, client: Any = None
    ) -> list[Any]:
        batcher: serving.ContinuousBatcher[Any, Any, Any]
        async with serving.ContinuousBatcher(OneStep(), 1, in_thread=False) as batcher:
            items = batcher.generate(request, priority=priority, client=client)
            return [item async for item in items]


USES: Final[Mapping[str, Use]] = {
    "serving.Batcher": Use(
        lambda _: serving.Batcher,
        needs_worker=False,
        right={
            "function": lambda _: _give_back_all,
            "max_size": lambda _: 1,
            "max_wait_s": lambda _: 0.0,
            "max_queue_age_s": lambda _: 1e30,
        },
        fits={
            "function": ANY_CALLABLE,
            "max_size": COUNTS,
            "max_wait_s": DURATIONS,
            "batches_max": COUNTS,
            "max_bytes": COUNTS | {"none"},
            "size_of": ANY_CALLABLE,
            "bucket": ANY_CALLABLE | {"none"},
            "standing_queue_age_s": SECONDS,
            "warm_up": WARM_UP,
            **QUEUES,
        },
        finish=nothing,
    ),
    "serving.Batcher.__aenter__": Use(
        lambda _: giving(serving.Batcher(_give_back_all, 1, 0.0)), needs_worker=False
    ),
    "serving.Batcher.__call__": Use(
        lambda world: world.kept["batcher"],
        ready=_batcher,
        needs_worker=False,
        right={"item": lambda _: 1},
        fits={"item": ANYTHING, **REQUEST},
    ),
    "serving.Batcher.stats": Use(
        lambda _: serving.Batcher(_give_back_all, 1, 0.0).stats, needs_worker=False
    ),
    "serving.ContinuousBatcher": Use(
        lambda _: serving.ContinuousBatcher,
        needs_worker=False,
        right={
            "model": lambda _: OneStep(),
            "slots": lambda _: 1,
            "max_queue_age_s": lambda _: 1e30,
        },
        fits={
            "slots": COUNTS,
            "memory_max": {"none"},  # without `memory_of`, and the other way round
            "memory_of": {"none"},
            "inside_max": COUNTS | {"none"},
            "entering_max": COUNTS | {"none"},
            "items_max": COUNTS,
            "pause_max_s": DURATIONS,
            "standing_queue_age_s": SECONDS,
            "warm_up": WARM_UP,
            "in_thread": FLAG,
            **QUEUES,
        },
        says={"memory_max": "memory_max", "memory_of": "memory_of"},
        finish=nothing,
    ),
    "serving.ContinuousBatcher.__aenter__": Use(
        lambda _: giving(serving.ContinuousBatcher(OneStep(), 1)), needs_worker=False
    ),
    "serving.ContinuousBatcher.generate": Use(
        lambda _: _Entered().generate,
        needs_worker=False,
        rightly=_generate,
        right={"request": lambda _: 1},
        fits={"request": ANYTHING, **REQUEST},
    ),
    "serving.ContinuousBatcher.stats": Use(
        lambda _: serving.ContinuousBatcher(OneStep(), 1).stats, needs_worker=False
    ),
    "serving.Limiter": Use(
        lambda _: serving.Limiter,
        needs_worker=False,
        right={"running_max": lambda _: 1, "max_queue_age_s": lambda _: 1e30},
        fits={"running_max": COUNTS, "standing_queue_age_s": SECONDS, **QUEUES},
        finish=nothing,
    ),
    "serving.Limiter.turn": Use(
        lambda _: serving.Limiter(1).turn, needs_worker=False, fits=REQUEST
    ),
    "serving.Limiter.stats": Use(
        lambda _: serving.Limiter(1).stats, needs_worker=False
    ),
}
