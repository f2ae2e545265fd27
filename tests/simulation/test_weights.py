"""New weights on replicas that serve, in virtual time: whole or not at all."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final

import pytest
import torch
from torch import nn

import asyncrpc
from asyncrpc import Options, UsageError, Worker, serving
from asyncrpc.errors import PublishError
from asyncrpc.serving.weights import transfer
from asyncrpc.serving.weights.served_model import VERSION_MAX
from asyncrpc.testing import Cluster
from asyncrpc.testing.network import Network
from tests.simulation.seeds import simulated

OPTIONS = Options(drain_timeout_s=2.0)
AT_ONCE = serving.ReplicaOptions(warm_s=0.0, hedge_quantile=None)
SIZE: Final = 8

served: dict[str, serving.ServedModel[nn.Module]] = {}  # by worker, in this process


class Layers(nn.Module):
    """All numbers of one version are the same: a mixture shows."""

    def __init__(self, value: float, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(layers))
        self.register_buffer("steps", torch.zeros(()))
        fill(self, value)


def fill(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.fill_(value)


async def values() -> list[float]:
    """Return all numbers that a batch sees, with pauses between layers."""
    with served[asyncrpc.current_worker().name].batch() as current:
        seen = set()
        for tensor in current.model.state_dict().values():
            seen.update(tensor.flatten().tolist())
            await asyncio.sleep(0.01)
        return sorted(seen)


@asynccontextmanager
async def group(
    network: Network, count: int = 3, value: float = 0.0
) -> AsyncIterator[tuple[Worker, Worker, list[Worker]]]:
    """A trainer, a web worker, and replicas that serve version 0."""
    names = ["trainer", "web", *(f"model-{number}" for number in range(count))]
    async with (
        Cluster(names=names, network=network, options=OPTIONS) as workers,
        AsyncExitStack() as stack,
    ):
        trainer, web, *models = workers
        for model in models:
            served[model.name] = serving.ServedModel(Layers(value))
            replica = serving.Replica(
                model, model=served[model.name], drain_timeout_s=0.0
            )
            await stack.enter_async_context(replica)
        yield trainer, web, models
        served.clear()


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tensor is a part of its own: the most can happen between them."""
    monkeypatch.setattr(transfer, "CHUNK_BYTES", 1)


@simulated(range(5))
async def test_batch_sees_a_single_version_and_its_answer_names_it(
    network: Network,
) -> None:
    async with (
        group(network) as (trainer, web, _),
        serving.Replicas(web, "model-*", options=AT_ONCE) as replicas,
    ):
        await replicas.wait_ready(3)
        publisher = serving.Publisher(trainer, "model-*")
        ended = asyncio.Event()
        versions: Counter[int] = Counter()

        async def ask() -> None:
            while not ended.is_set():
                answer = await replicas.answer(values)
                assert answer.version is not None
                assert answer.value == [float(answer.version)]
                versions[answer.version] += 1

        async with asyncio.TaskGroup() as asking:
            for _ in range(6):
                asking.create_task(ask())
            for number in range(1, 6):
                await asyncio.sleep(network.rng.uniform(0.0, 0.2))
                publication = await publisher.publish(Layers(float(number)))
                assert publication.version == number
                assert publication.replicas == ("model-0", "model-1", "model-2")
            await asyncio.sleep(0.3)
            ended.set()
        assert versions[0] > 0 < versions[5]
        assert len(versions) >= 4
        versions_told = [replica.version for replica in replicas.statistics().replicas]
        assert versions_told == [5, 5, 5]


@simulated()
async def test_mismatched_weights_change_no_replica(network: Network) -> None:
    async with group(network) as (trainer, _, models):
        publisher = serving.Publisher(trainer, "model-*")
        with pytest.raises(PublishError, match="is missing"):
            await publisher.publish(Layers(1.0, layers=3))
        with pytest.raises(PublishError, match="is not in it"):
            await publisher.publish(Layers(1.0, layers=5))
        state = Layers(1.0).state_dict()
        state["layers.0.weight"] = torch.ones(SIZE, SIZE + 1)
        with pytest.raises(PublishError, match=r"shape \[8, 9\], not \[8, 8\]"):
            await publisher.publish(state)
        state["layers.0.weight"] = torch.ones(SIZE, SIZE, dtype=torch.int64)
        with pytest.raises(PublishError, match="int64"):
            await publisher.publish(state)
        # One replica has another model: the others take none of it, either.
        with served["model-1"].batch() as current:
            current.model.register_buffer("more", torch.zeros(1))
        with pytest.raises(PublishError, match="none serves it"):
            await publisher.publish(Layers(1.0))
        await asyncio.sleep(1.0)
        assert await publisher.versions() == dict.fromkeys(served, 0)
        for model in models:
            assert served[model.name].weights.history.transfer is None
            assert not served[model.name].weights.room


@simulated(range(20))
async def test_publisher_lost_midway_changes_nothing(network: Network) -> None:
    """At each moment of a transfer; then another one publishes as if nothing was."""
    async with group(network, 2) as (trainer, web, models):
        publisher = serving.Publisher(trainer, "model-*")
        publishing = asyncio.ensure_future(publisher.publish(Layers(1.0)))
        # Nine tensors in each transfer, with two messages each, of 1 ms.
        await asyncio.sleep(network.rng.uniform(0.0, 0.03))
        network.crash("trainer")
        await asyncio.wait([publishing])
        publishing.exception()
        while any(  # noqa: ASYNC110  (virtual time)
            served[model.name].weights.history.transfer for model in models
        ):
            await asyncio.sleep(0.1)
        for model in models:
            with served[model.name].batch() as current:
                (value,) = {
                    number
                    for tensor in current.model.state_dict().values()
                    for number in tensor.flatten().tolist()
                }
            assert value == current.number in (0, 1)
            assert not served[model.name].weights.room
        other = serving.Publisher(web, "model-*")
        assert (await other.publish(Layers(2.0))).version in (1, 2)


@simulated()
async def test_lost_replica_does_not_delay_the_others(network: Network) -> None:
    async with group(network) as (trainer, _, _):
        publisher = serving.Publisher(trainer, "model-*")
        publishing = asyncio.ensure_future(publisher.publish(Layers(1.0)))
        while not served["model-1"].weights.history.transfer:  # noqa: ASYNC110  (likewise)
            await asyncio.sleep(0.001)
        network.crash("model-1")
        publication = await publishing
        assert publication.replicas == ("model-0", "model-2")
        assert publication.lost == ("model-1",)


@simulated(range(3))
async def test_canary_gets_its_share_and_is_promoted_or_withdrawn(
    network: Network,
) -> None:
    async with (
        group(network) as (trainer, web, _),
        serving.Replicas(web, "model-*", options=AT_ONCE) as replicas,
    ):
        await replicas.wait_ready(3)
        publisher = serving.Publisher(trainer, "model-*")

        async def share_of(version: int, *, keyed: bool) -> float:
            calls = []
            for number in range(400):
                through = replicas.using(key=number) if keyed else replicas
                calls.append(through.answer(values))
            answers = await asyncio.gather(*calls)
            assert all(answer.value == [answer.version] for answer in answers)
            return sum(answer.version == version for answer in answers) / len(answers)

        publication = await publisher.publish(Layers(1.0), canary=0.2)
        assert publication.replicas == ("model-0",)
        await asyncio.sleep(0.1)
        assert 0.12 <= await share_of(1, keyed=False) <= 0.28
        assert 0.12 <= await share_of(1, keyed=True) <= 0.28
        assert (await publisher.promote()).replicas == tuple(sorted(served))
        await asyncio.sleep(0.1)
        assert await share_of(1, keyed=False) == 1.0
        publication = await publisher.publish(Layers(2.0), canary=0.5, canaries=2)
        assert publication.replicas == ("model-0", "model-1")
        assert set((await publisher.roll_back()).values()) == {1}
        await asyncio.sleep(0.1)
        assert await share_of(1, keyed=False) == 1.0
        with pytest.raises(UsageError, match="no canary"):
            await publisher.promote()


@simulated()
async def test_rollback_from_any_worker_is_idempotent(network: Network) -> None:
    async with group(network) as (trainer, web, _):
        publisher = serving.Publisher(trainer, "model-*")
        await publisher.publish(Layers(1.0), version=10)
        other = serving.Publisher(web, "model-*")
        assert set((await other.roll_back(10)).values()) == {0}
        assert set((await other.roll_back(10)).values()) == {0}
        with pytest.raises(PublishError, match="no earlier one is kept"):
            await other.roll_back()
        publication = await publisher.publish(Layers(1.0))
        assert publication.version == 1


@simulated(range(10))
async def test_versions_of_two_publishers_do_not_mix(network: Network) -> None:
    async with group(network) as (trainer, web, _):
        first, other = (
            serving.Publisher(worker, "model-*") for worker in (trainer, web)
        )
        publications = await asyncio.gather(
            first.publish(Layers(1.0), version=1),
            other.publish(Layers(2.0), version=2),
            return_exceptions=True,
        )
        failed = [
            found_ for found_ in publications if isinstance(found_, BaseException)
        ]
        assert all(isinstance(error, PublishError) for error in failed)
        await asyncio.sleep(1.0)
        assert len(set((await first.versions()).values())) == 1
        assert (await first.publish(Layers(3.0), version=3)).version == 3


@simulated()
async def test_newcomer_catches_up_before_it_is_ready(network: Network) -> None:
    async with group(network) as (trainer, _, models):
        publisher = serving.Publisher(trainer, "model-[01]")
        await publisher.publish(Layers(4.0), version=4)
        late = served["model-2"]
        assert late.version == 0
        assert await serving.catch_up(late, "model-*", models[2]) == 4
        assert await serving.catch_up(late, "model-*", models[2]) == 4
        with late.batch() as current:
            assert current.number == 4
            assert current.model.state_dict()["steps"].item() == 4.0


@simulated()
async def test_weights_written_to_during_a_publication_are_refused(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with group(network) as (trainer, _, _):
        weights = Layers(1.0)
        publisher = serving.Publisher(trainer, "model-*")
        run_in_thread = trainer.parts.run_in_thread

        def written_meanwhile(job: Callable[[], Any]) -> asyncio.Future[Any]:
            fill(weights, 2.0)
            return run_in_thread(job)

        monkeypatch.setattr(trainer.parts, "run_in_thread", written_meanwhile)
        with pytest.raises(UsageError, match="were written to"):
            await publisher.publish(weights)
        assert await publisher.versions() == dict.fromkeys(served, 0)


@simulated()
async def test_publication_after_the_highest_version_needs_a_number(
    network: Network,
) -> None:
    """Any member may bring it, and nobody is kept from bringing another."""
    async with group(network) as (trainer, _, _models):
        publisher = serving.Publisher(trainer, "model-*")
        await publisher.publish(Layers(1.0), version=VERSION_MAX)
        with pytest.raises(UsageError, match="a number, version="):
            await publisher.publish(Layers(2.0))
        await publisher.publish(Layers(2.0), version=7)
        assert await publisher.versions() == dict.fromkeys(served, 7)
        await publisher.publish(Layers(2.0), version=8)
        assert (await publisher.publish(Layers(3.0))).version == 9


@simulated()
async def test_floats_are_converted_and_tied_weights_stay_tied(
    network: Network,
) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4, bias=False)
            self.other = nn.Linear(4, 4, bias=False)
            self.other.weight = self.layer.weight
            self.scale = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))

    async with Cluster(names=["trainer", "model"], network=network) as (a, b):
        model = serving.ServedModel(Tied())
        async with serving.Replica(b, model=model):
            new = Tied()
            with torch.no_grad():
                new.layer.weight.fill_(3.0)
            new.scale = nn.Parameter(torch.ones(4))
            await serving.Publisher(a, "model").publish(new)
            with model.batch() as current:
                assert current.model.layer.weight is current.model.other.weight
                assert current.model.scale.dtype is torch.bfloat16
                assert isinstance(current.model.scale, nn.Parameter)
                assert current.model.scale.tolist() == [1.0] * 4
