"""How replicas, and the weights that they serve, are used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

from asyncrpc import serving
from asyncrpc.testing import Cluster, acting_as
from tests.integration.misuse.uses_values import CALLABLES, FLAG
from tests.integration.misuse.using import Use, nothing
from tests.integration.misuse.wrong import SECONDS, World

TEXT: Final = {"text", "text with a surrogate", "too large"}
COUNTS: Final = {"an integer", "an integer of 70 bits"}
DURATIONS: Final = SECONDS - {"none"}
WORKERS: Final = {"an ended worker", "another worker", "none"}
LIMITS: Final = SECONDS | {"infinite"}


def _linear() -> torch.nn.Module:
    return torch.nn.Linear(2, 2)


async def _rolled_out(_: World) -> None:
    """Call replicas, publish to them, and drain one, in a group made for it."""
    async with Cluster(names=["web", "m-0", "m-1"]) as (web, worker, other):
        model = serving.ServedModel(_linear())
        replica = serving.Replica(worker, model=model, ready=False)
        async with (
            replica,
            serving.Replica(other, model=serving.ServedModel(_linear())),
            serving.Replicas(web, "m-*") as replicas,
        ):
            replica.make_ready()
            await replicas.wait_ready(2)
            assert await replicas.using(key=1).call(len, "ab") == 2
            publisher = serving.Publisher(web, "m-*")
            await publisher.publish(_linear(), canary=0.5)
            await publisher.promote()
            await publisher.roll_back()
            assert await serving.catch_up(model, "m-*", worker) == 0
            assert await publisher.versions() == {"m-0": 0, "m-1": 0}
            with acting_as(worker):
                assert await serving.drain()
            assert await replica.drain()
            assert len(replicas.statistics().replicas) == 2


def _replicas(world: World) -> serving.Replicas:
    return serving.Replicas(world.a, "b")


def _publisher(world: World) -> serving.Publisher:
    return serving.Publisher(world.a, "b")


def _served(_: Any) -> serving.ServedModel[torch.nn.Module]:
    return serving.ServedModel(_linear())


USES: Final[Mapping[str, Use]] = {
    "serving.ReplicaOptions": Use(
        lambda _: serving.ReplicaOptions,
        needs_worker=False,
        fits={
            "attempts_max": COUNTS,
            "retry_share": {"a fraction"},
            "hedge_quantile": {"none", "a fraction"},
            "hedge_share": {"a fraction"},
            "eject_after": COUNTS,
            "eject_s": DURATIONS,
            "eject_share": {"a fraction"},
            "warm_s": DURATIONS,
            "key_load_max": {"none", "infinite"} | COUNTS,
            "ready_timeout_s": DURATIONS,
        },
    ),
    "serving.Replica": Use(
        lambda _: serving.Replica,
        needs_worker=False,
        fits={
            "worker": WORKERS,
            "load": CALLABLES | {"none", "a local function", "raises in everything"},
            "model": {"none"},
            "weight": DURATIONS,
            "ready": FLAG,
            "drain_timeout_s": LIMITS,
        },
        finish=nothing,
    ),
    "serving.Replica.__aenter__": Use(
        lambda world: serving.Replica(world.a).__aenter__,
        rightly=_rolled_out,
        needs_worker=False,
    ),
    "serving.Replica.make_ready": Use(
        lambda world: serving.Replica(world.a).make_ready,
        rightly=_rolled_out,
        needs_worker=False,
    ),
    "serving.Replica.drain": Use(
        lambda world: serving.Replica(world.a).drain,
        rightly=_rolled_out,
        fits={"timeout_s": LIMITS},
        needs_worker=False,
    ),
    "serving.drain": Use(
        lambda _: serving.drain,
        rightly=_rolled_out,
        fits={"timeout_s": LIMITS},
        needs_worker=False,
    ),
    "serving.Replicas": Use(
        lambda _: serving.Replicas,
        needs_worker=False,
        right={"worker": lambda world: world.a, "names": lambda _: "b"},
        fits={"worker": WORKERS, "names": TEXT, "options": {"none"}},
        finish=nothing,
    ),
    "serving.Replicas.__aenter__": Use(
        lambda world: _replicas(world).__aenter__,
        rightly=_rolled_out,
        needs_worker=False,
    ),
    "serving.Replicas.using": Use(
        lambda world: _replicas(world).using,
        says={"options": "no call option 'wrong'; the options are "},
        needs_worker=False,
        finish=nothing,
    ),
    "serving.Replicas.wait_ready": Use(
        lambda world: _replicas(world).wait_ready,
        rightly=_rolled_out,
        fits={"count": COUNTS, "timeout_s": LIMITS},
        needs_worker=False,
    ),
    "serving.Replicas.statistics": Use(
        lambda world: _replicas(world).statistics,
        rightly=_rolled_out,
        needs_worker=False,
    ),
    "serving.ServedModel": Use(
        lambda _: serving.ServedModel,
        needs_worker=False,
        right={"model": lambda _: _linear()},
        fits={"version": {"an integer"}, "keep": COUNTS},
        finish=nothing,
    ),
    "serving.ServedModel.batch": Use(
        lambda world: _served(world).batch, needs_worker=False, finish=nothing
    ),
    "serving.ServedModel.tell": Use(
        lambda world: _served(world).tell,
        needs_worker=False,
        right={"version": lambda _: 1},
        fits={"version": {"an integer"}},
    ),
    "serving.Publisher": Use(
        lambda _: serving.Publisher,
        needs_worker=False,
        right={"worker": lambda world: world.a, "names": lambda _: "b"},
        fits={"worker": WORKERS, "names": TEXT},
        finish=nothing,
    ),
    "serving.Publisher.publish": Use(
        lambda world: _publisher(world).publish,
        rightly=_rolled_out,
        right={"weights": lambda _: _linear()},
        fits={
            "version": {"none", "an integer"},
            "canary": {"a fraction"},
            "canaries": COUNTS,
        },
        needs_worker=False,
    ),
    "serving.Publisher.promote": Use(
        lambda world: _publisher(world).promote, rightly=_rolled_out, needs_worker=False
    ),
    "serving.Publisher.roll_back": Use(
        lambda world: _publisher(world).roll_back,
        rightly=_rolled_out,
        fits={"version": {"none", "an integer"}},
        needs_worker=False,
    ),
    "serving.Publisher.versions": Use(
        lambda world: _publisher(world).versions,
        rightly=_rolled_out,
        needs_worker=False,
    ),
    "serving.catch_up": Use(
        lambda _: serving.catch_up,
        rightly=_rolled_out,
        right={
            "served": _served,
            "names": lambda _: "b",
            "worker": lambda world: world.a,
        },
        fits={"names": TEXT, "worker": WORKERS},
        needs_worker=False,
    ),
}
