"""Every rank comes to the mean of the gradients of all."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.optim.apply_optimizer_in_backward import (
    _apply_optimizer_in_backward as in_backward,
)

from asyncrpc import Group, UsageError
from asyncrpc.ddp import DDPStatistics, DistributedDataParallel
from tests.integration.parallel.ddp.ranks import (
    Branches,
    Mlp,
    Model,
    at_all,
    grads_of,
    groups_of,
    identical,
    loss_of,
    mean_grads,
    rows,
    same,
    wrapped,
)

SMALL = 100 / (1 << 20)  # MiB: 25 elements, so that there are many buckets
OPTIONS: list[dict[str, Any]] = [
    {},
    {"gradient_as_bucket_view": False},
    {"bucket_cap_mb": SMALL, "first_bucket_cap_mb": SMALL},
    {"find_unused_parameters": True},
    {"static_graph": True},
    {"static_graph": True, "gradient_as_bucket_view": False, "bucket_cap_mb": SMALL},
]


@pytest.fixture(params=[1, 2, 3])
async def groups(request: pytest.FixtureRequest) -> AsyncIterator[list[Group]]:
    async with groups_of(int(request.param)) as groups:
        yield groups


@pytest.fixture
async def pair() -> AsyncIterator[list[Group]]:
    async with groups_of(2) as groups:
        yield groups


async def backward(rank: int, model: Model, step: int = 0) -> None:
    await model.backward(loss_of(model(rows(rank, step))))


class TestGradients:
    @pytest.mark.parametrize("options", OPTIONS)
    async def test_gradients_are_the_mean_in_every_pass(
        self, groups: list[Group], options: dict[str, Any]
    ) -> None:
        models = await wrapped(groups, Mlp, **options)

        async def run(rank: int, model: Model) -> None:
            for step in range(4):
                model.zero_grad(set_to_none=step % 2 == 0)
                await backward(rank, model, step)
                gradients.setdefault(step, []).append(grads_of(model))

        gradients: dict[int, list[Any]] = {}
        await at_all(models, run)
        for step, all_ in gradients.items():
            assert identical(all_)
            assert same(all_[0], mean_grads(Mlp, len(groups), step))

    @pytest.mark.parametrize("options", OPTIONS)
    async def test_gradients_of_plain_backward_in_a_thread_are_the_mean(
        self, pair: list[Group], options: dict[str, Any]
    ) -> None:
        models = await wrapped(pair, Mlp, **options)

        async def run(rank: int, model: Model) -> None:
            for step in range(3):
                model.zero_grad()
                loss = loss_of(model(rows(rank, step)))
                await asyncio.to_thread(loss.backward)
                assert same(grads_of(model), mean_grads(Mlp, 2, step))

        await at_all(models, run)

    @pytest.mark.parametrize("options", OPTIONS)
    async def test_gradients_of_a_loss_computed_in_the_pass_are_the_mean(
        self, pair: list[Group], options: dict[str, Any]
    ) -> None:
        """The thread of the pass computes the loss in the caller's context."""
        models = await wrapped(pair, Mlp, **options)
        asked_by: ContextVar[int] = ContextVar("asked_by")

        async def run(rank: int, model: Model) -> None:
            asked_by.set(rank)
            for step in range(3):

                def compute(step: int = step) -> torch.Tensor:
                    assert threading.current_thread() is not threading.main_thread()
                    return loss_of(model(rows(asked_by.get(), step)))

                model.zero_grad()
                loss = await model.backward(compute)
                assert torch.equal(loss, loss_of(model(rows(rank, step))))
                assert same(grads_of(model), mean_grads(Mlp, 2, step))
            with model.no_sync():
                await model.backward(lambda: loss_of(model(rows(rank, 3))))
            assert not same(grads_of(model), mean_grads(Mlp, 2, 2))

        await at_all(models, run)

    @pytest.mark.parametrize("as_view", [True, False])
    async def test_gradients_add_up_over_passes(
        self,
        pair: list[Group],
        as_view: bool,  # noqa: FBT001
    ) -> None:
        models = await wrapped(pair, Mlp, gradient_as_bucket_view=as_view)

        async def run(rank: int, model: Model) -> None:
            for step in range(3):
                await backward(rank, model, step)

        await at_all(models, run)
        wanted = [mean_grads(Mlp, 2, step) for step in range(3)]
        total = [
            sum(g for g in grads if g is not None)
            for grads in zip(*wanted, strict=True)
        ]
        assert same(grads_of(models[0]), [torch.as_tensor(grad) for grad in total])
        assert identical([grads_of(model) for model in models])

    async def test_gradients_of_several_losses_are_the_sum(
        self, pair: list[Group]
    ) -> None:
        models = await wrapped(pair, Mlp)

        async def run(rank: int, model: Model) -> None:
            output = model(rows(rank))
            await model.backward([output, output], [torch.ones(5, 3)] * 2)

        await at_all(models, run)
        module = Mlp()
        for rank in range(2):
            torch.autograd.backward(module(rows(rank)).sum())
        assert same(grads_of(models[1]), grads_of(module))

    async def test_gradients_within_no_sync_stay_local(self, pair: list[Group]) -> None:
        models = await wrapped(pair, Mlp)

        async def run(rank: int, model: Model) -> None:
            with model.no_sync():
                await backward(rank, model, 0)
                alone = Mlp()
                torch.autograd.backward(loss_of(alone(rows(rank, 0))))
                assert same(grads_of(model), grads_of(alone))
                with model.no_sync():
                    loss = loss_of(model(rows(rank, 1)))
                await asyncio.to_thread(loss.backward)
            await backward(rank, model, 2)

        await at_all(models, run)
        steps = [mean_grads(Mlp, 2, step) for step in range(3)]
        total = [
            sum(g for g in grads if g is not None) for grads in zip(*steps, strict=True)
        ]
        assert same(grads_of(models[0]), [torch.as_tensor(grad) for grad in total])

    async def test_gradients_have_their_own_memory_on_request(
        self, pair: list[Group]
    ) -> None:
        models = await wrapped(pair, Mlp, gradient_as_bucket_view=False)
        await at_all(models, backward)
        weight = next(models[0].parameters())
        grad = weight.grad
        assert grad is not None
        before = grad.clone()
        with models[0].no_sync():
            await backward(0, models[0])
        assert weight.grad is grad
        assert not torch.equal(grad, before)


class Cut(torch.autograd.Function):
    """Has no gradient."""

    @staticmethod
    def forward(_: Any, tensor: torch.Tensor) -> torch.Tensor:
        """Return the same values."""
        return tensor.clone()

    @staticmethod
    def backward(_: Any, __: torch.Tensor) -> None:
        """Return no gradient."""
        return


class TestUnused:
    async def test_unused_parameters_are_found(self, pair: list[Group]) -> None:
        """Each rank uses another branch; what no rank uses has no gradient."""
        models = await wrapped(pair, Branches, find_unused_parameters=True)

        async def run(rank: int, model: Model) -> None:
            for step in range(3):
                model.zero_grad()
                loss = loss_of(model(rows(rank, step), rank))
                if step == 1:
                    await asyncio.to_thread(loss.backward)
                else:
                    await model.backward(loss)

        await at_all(models, run)
        alone = Branches()
        for rank in range(2):
            torch.autograd.backward(loss_of(alone(rows(rank, 2), rank)).div(2))
        assert same(grads_of(models[0]), grads_of(alone))
        assert identical([grads_of(model) for model in models])
        assert models[0].module.never.grad is None

    async def test_unused_parameters_keep_their_gradients(
        self, pair: list[Group]
    ) -> None:
        models = await wrapped(pair, Branches, find_unused_parameters=True)
        never = [model.get_parameter("module.never") for model in models]
        for parameter in never:
            parameter.grad = torch.full((3,), 5.0)

        async def run(rank: int, model: Model) -> None:
            await model.backward(loss_of(model(rows(rank), 0)))

        await at_all(models, run)
        assert all(
            torch.equal(torch.as_tensor(unused.grad), torch.full((3,), 5.0))
            for unused in never
        )

    @pytest.mark.parametrize("is_plain", [False, True])
    @pytest.mark.parametrize("at", [{0, 1}, {1}, set()])
    async def test_parameters_with_a_none_gradient_count_as_unused(
        self,
        pair: list[Group],
        at: set[int],
        is_plain: bool,  # noqa: FBT001
    ) -> None:
        """A function of the program may have no gradient, at some ranks or at all."""
        models = await wrapped(pair, Mlp, find_unused_parameters=True)

        async def run(rank: int, model: Model) -> None:
            output = model(rows(rank))
            cut: Any = Cut.apply
            loss = loss_of(cut(output) if rank in at else output)
            if is_plain:
                await asyncio.to_thread(loss.backward)
            else:
                await model.backward(loss)

        await at_all(models, run)
        alone = Mlp()
        for rank in {0, 1} - at:
            torch.autograd.backward(loss_of(alone(rows(rank))).div(2))
        assert same(grads_of(models[0]), grads_of(alone))
        assert identical([grads_of(model) for model in models])

    async def test_unused_parameters_of_a_static_graph_are_learned(
        self, pair: list[Group]
    ) -> None:
        models = await wrapped(pair, Branches, static_graph=True)

        async def run(rank: int, model: Model) -> None:
            for step in range(3):
                model.zero_grad()
                await model.backward(loss_of(model(rows(rank, step), branch=rank)))

        await at_all(models, run)
        alone = Branches()
        for rank in range(2):
            torch.autograd.backward(loss_of(alone(rows(rank, 2), rank)).div(2))
        assert same(grads_of(models[0]), grads_of(alone))
        assert identical([grads_of(model) for model in models])

    async def test_reentrant_checkpoints_work_in_a_static_graph(
        self, pair: list[Group]
    ) -> None:
        class Twice(Mlp):
            def forward(self, rows: torch.Tensor) -> torch.Tensor:
                rows = rows.requires_grad_()
                out: torch.Tensor
                for _ in range(2):
                    out = torch.utils.checkpoint.checkpoint(
                        super().forward, rows, use_reentrant=True
                    )
                    rows = torch.cat([out, out], 1)
                return out

        models = await wrapped(pair, Twice, static_graph=True)

        async def run(rank: int, model: Model) -> None:
            for step in range(3):
                model.zero_grad()
                await backward(rank, model, step)

        await at_all(models, run)
        assert same(grads_of(models[0]), mean_grads(Twice, 2, 2))


class Mixed(nn.Module):
    """Parameters of several dtypes and layouts; one is shared, one is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.wide = nn.Linear(6, 4).double()
        self.narrow = nn.Linear(4, 4).bfloat16()
        self.tied = nn.Linear(4, 4)
        self.tied.weight = nn.Parameter(self.tied.weight.t())  # strides of its own
        self.again = nn.Linear(4, 4)
        self.again.weight = self.tied.weight
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.conv = nn.Conv2d(1, 2, 3, padding=1)
        weight = self.conv.weight.data.contiguous(memory_format=torch.channels_last)
        self.conv.weight = nn.Parameter(weight)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Map `(batch, 6)` to a mean over an image."""
        hidden = self.narrow(self.wide(rows.double()).bfloat16()).float()
        hidden = self.again(self.tied(hidden)) * self.frozen * self.scalar
        result: torch.Tensor = self.conv(hidden.view(-1, 1, 2, 2))
        return result


class TestModules:
    @pytest.mark.parametrize("as_view", [True, False])
    async def test_module_of_mixed_dtypes_and_layouts_trains(
        self,
        pair: list[Group],
        as_view: bool,  # noqa: FBT001
    ) -> None:
        models = await wrapped(pair, Mixed, gradient_as_bucket_view=as_view)

        async def run(rank: int, model: Model) -> None:
            for step in range(3):
                model.zero_grad()
                await backward(rank, model, step)

        await at_all(models, run)
        wanted = mean_grads(Mixed, 2, 2)
        for grad, expected in zip(grads_of(models[0]), wanted, strict=True):
            if expected is None:
                assert grad is None
                continue
            assert grad is not None
            assert grad.dtype == expected.dtype
            tolerance = 0.02 if grad.dtype == torch.bfloat16 else 1e-5
            assert torch.allclose(grad, expected, rtol=tolerance, atol=tolerance)
        assert identical([grads_of(model) for model in models])

    async def test_module_with_sparse_gradients_trains(
        self, groups: list[Group]
    ) -> None:
        def make() -> nn.Module:
            torch.manual_seed(4)
            return nn.Sequential(nn.Embedding(20, 4, sparse=True), nn.Linear(4, 2))

        models = await wrapped(groups, make)

        async def run(rank: int, model: Model) -> None:
            for _ in range(2):
                model.zero_grad()
                await model.backward(loss_of(model(torch.tensor([rank, 3, 3]))))

        await at_all(models, run)
        alone = make()
        for rank in range(len(groups)):
            loss = loss_of(alone(torch.tensor([rank, 3, 3])))
            torch.autograd.backward(loss.div(len(groups)))
        for model in models:
            for parameter, expected in zip(
                model.parameters(), alone.parameters(), strict=True
            ):
                assert parameter.grad is not None
                assert expected.grad is not None
                assert parameter.grad.is_sparse == expected.grad.is_sparse
                assert torch.allclose(
                    parameter.grad.to_dense(), expected.grad.to_dense()
                )

    async def test_modules_are_equal_after_the_start(self, pair: list[Group]) -> None:
        modules = [nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)) for _ in range(2)]
        modules[0].get_buffer("1.running_mean").fill_(7)
        models = await asyncio.gather(
            *(DistributedDataParallel(m, g) for m, g in zip(modules, pair, strict=True))
        )
        first, second = (model.state_dict() for model in models)
        assert list(first) == list(second)
        assert all(torch.equal(first[name], second[name]) for name in first)
        assert second["module.1.running_mean"].tolist() == [7, 7]

    @pytest.mark.parametrize("within", [False, True])
    async def test_modules_take_the_buffers_of_rank_0(
        self,
        pair: list[Group],
        within: bool,  # noqa: FBT001
    ) -> None:
        """Also buffers that the pass itself has changed before the first message."""

        def make() -> nn.Module:
            return nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 2))

        async def run(rank: int, model: Model) -> None:
            def compute() -> torch.Tensor:
                return loss_of(model(rows(rank)))

            await model.backward(compute if within else compute())

        models = await wrapped(pair, make)
        await at_all(models, run)
        alone = make()
        alone(rows(0))
        for model in models:
            for name, wanted in alone.named_buffers():
                assert torch.equal(model.module.get_buffer(name), wanted)

    async def test_modules_keep_their_buffers_on_request(
        self, pair: list[Group]
    ) -> None:
        models = await wrapped(pair, lambda: nn.BatchNorm1d(6), broadcast_buffers=False)
        await at_all(models, backward)
        first, second = (model.module.get_buffer("running_mean") for model in models)
        assert not torch.equal(first, second)

    async def test_ignored_parameters_are_not_reduced(self, pair: list[Group]) -> None:
        models = await wrapped(pair, Mlp, ignored=["second.bias"])
        await at_all(models, backward)
        first, second = map(grads_of, models)
        names = [name for name, _ in models[0].module.named_parameters()]
        differ = [
            name
            for name, a, b in zip(names, first, second, strict=True)
            if not torch.equal(torch.as_tensor(a), torch.as_tensor(b))
        ]
        assert differ == ["second.bias"]

    async def test_two_modules_of_a_group_train_at_once(
        self, pair: list[Group]
    ) -> None:
        """Their passes may run at the same time, in any order."""
        first_models, second_models = await wrapped(pair, Mlp), await wrapped(pair, Mlp)

        async def run(rank: int, model: Model) -> None:
            both = [backward(rank, model), backward(rank, second_models[rank])]
            await asyncio.gather(*(both if rank else reversed(both)))

        await at_all(first_models, run)
        assert same(grads_of(first_models[0]), mean_grads(Mlp, 2))
        assert identical([grads_of(model) for model in [*first_models, *second_models]])

    async def test_former_wrapper_is_freed_at_once(self, pair: list[Group]) -> None:
        """At once: a cycle would be collected at another moment at each rank."""
        models = await wrapped(pair, Mlp)
        await at_all(models, backward)
        former = [weakref.ref(model) for model in models]
        modules = [model.module for model in models]
        gc.disable()
        try:
            models.clear()
            assert [reference() for reference in former] == [None, None]
        finally:
            gc.enable()
        again = [Model(module, pair[rank]) for rank, module in enumerate(modules)]
        await asyncio.gather(*again)
        for model in again:
            model.zero_grad()
        await at_all(again, backward)
        assert same(grads_of(again[0]), mean_grads(Mlp, 2))

    async def test_closed_module_trains_alone(self, pair: list[Group]) -> None:
        models = await wrapped(pair, Mlp)
        await at_all(models, backward)
        for model in models:
            model.close()
            model.close()
            with pytest.raises(UsageError, match="await the module first"):
                model(rows(0))
            model.zero_grad()
            torch.autograd.backward(loss_of(model.module(rows(0))))
        assert identical([grads_of(model) for model in models])


class TestOptimizersInThePass:
    @pytest.mark.parametrize("options", OPTIONS)
    async def test_optimizers_in_the_pass_use_the_mean(
        self, groups: list[Group], options: dict[str, Any]
    ) -> None:
        def stepping() -> nn.Module:
            module = Mlp()
            in_backward(torch.optim.SGD, module.first.parameters(), {"lr": 0.1})
            return module

        models = await wrapped(groups, stepping, **options)

        async def run(rank: int, model: Model) -> None:
            for step in range(3):
                with model.no_sync():  # gathers, and steps later
                    await backward(rank, model, step)
                await asyncio.to_thread(loss_of(model(rows(rank, step))).backward)
                first = model.get_submodule("module.first")
                assert grads_of(first) == [None, None]
                model.zero_grad()

        await at_all(models, run)
        alone = Mlp()
        for step in range(3):
            alone.zero_grad()
            for rank in range(len(groups)):
                loss = loss_of(alone(rows(rank, step)))
                torch.autograd.backward(loss.mul(2 / len(groups)))
            with torch.no_grad():
                for parameter in alone.first.parameters():
                    parameter.sub_(0.1 * torch.as_tensor(parameter.grad))
        for model in models:
            for mine, wanted in zip(
                model.module.parameters(), alone.parameters(), strict=True
            ):
                torch.testing.assert_close(mine, wanted)


class TestBuckets:
    async def test_buckets_follow_the_order_of_gradients(
        self, pair: list[Group]
    ) -> None:
        class Reversed(Mlp):
            """Its first layer is used last."""

            def __init__(self) -> None:
                super().__init__()
                self.first, self.second = nn.Linear(3, 2), nn.Linear(6, 3)

            def forward(self, rows: torch.Tensor) -> torch.Tensor:
                result: torch.Tensor = self.first(self.second(rows))
                return result

        options = {"bucket_cap_mb": SMALL, "first_bucket_cap_mb": SMALL}
        models = await wrapped(pair, Reversed, **options)
        await at_all(models, backward)
        kept = [grads_of(model) for model in models]
        sizes = models[0].statistics().bucket_bytes
        assert sum(sizes) == 4 * sum(
            number.numel() for number in models[0].parameters()
        )
        # The last layer's bias and weight, 32 bytes, are not enough to fill one.
        names = [
            [models[0]._gradients.learned[number].name for number in bucket]  # noqa: SLF001
            for bucket in models[0]._gradients.numbers  # noqa: SLF001
        ]
        assert {*names[0]} >= {"first.bias", "first.weight"}
        assert same(kept[0], mean_grads(Reversed, 2))
        assert identical(kept)

    async def test_statistics_count_passes_and_communication(
        self, pair: list[Group]
    ) -> None:
        models = await wrapped(pair, Mlp)
        await at_all(models, backward)
        statistics = models[0].statistics()
        assert isinstance(statistics, DDPStatistics)
        assert statistics.passes == 1
        assert statistics.communication_s > 0
        assert 0 <= statistics.hidden <= 1
