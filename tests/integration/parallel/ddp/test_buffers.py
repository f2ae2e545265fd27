"""Every rank has the buffers of rank 0 after a pass, whichever it has then."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.masked import masked_tensor

from asyncrpc import Group, UsageError
from asyncrpc.ddp import DistributedDataParallel
from asyncrpc.errors import CollectiveError
from tests.integration.parallel.ddp.ranks import (
    Model,
    at_all,
    groups_of,
    outcomes,
    wrapped,
)


@pytest.fixture
async def pair() -> AsyncIterator[list[Group]]:
    async with groups_of(2) as groups:
        yield groups


class Assigned(nn.Module):
    """A running mean that each forward pass assigns anew."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Map `(batch, 2)` to `(batch, 1)`."""
        self.mean = 0.5 * self.mean + 0.5 * rows.mean(0)
        result: torch.Tensor = self.linear(rows - self.mean)
        return result


class Divided(nn.Module):
    """A running maximum, by which a pass divides: autograd keeps it."""

    largest: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.linear = nn.Linear(2, 1)
        self.register_buffer("largest", torch.ones(2))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Map `(batch, 2)` to `(batch, 1)`."""
        with torch.no_grad():
            self.largest.copy_(torch.maximum(self.largest, rows.amax(0)))
        result: torch.Tensor = (self.linear(rows) * self.linear.weight) / self.largest
        return result.sum(1, keepdim=True)


def normed() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4))


def rows_of(rank: int) -> torch.Tensor:
    return torch.arange(6.0).view(3, 2).sin() + 1.0 + rank


class TestBuffersAssignedAnew:
    async def test_buffer_assigned_in_forward_is_that_of_rank_0(
        self, pair: list[Group]
    ) -> None:
        models = await wrapped(pair, Assigned)
        for expected in (rows_of(0).mean(0) / 2, rows_of(0).mean(0) * 3 / 4):

            async def run(rank: int, model: Model) -> None:
                await model.backward(model(rows_of(rank)).mean())

            await at_all(models, run)
            for model in models:
                assert torch.allclose(model.module.get_buffer("mean"), expected)

    async def test_regroup_sends_buffers_of_a_new_dtype(
        self, pair: list[Group]
    ) -> None:
        """The ranks meet again for new buckets, and the buffers are those of now."""
        models = await wrapped(pair, Assigned)

        async def run(rank: int, model: Model) -> torch.Tensor:
            model.double()
            await model.regroup(model.group)
            await model.backward(model(rows_of(rank).double()).mean())
            return model.module.get_parameter("linear.weight")

        first, second = await at_all(models, run)
        assert first.grad is not None
        assert first.grad.dtype == torch.float64
        assert torch.equal(first.grad, torch.as_tensor(second.grad))
        for model in models:
            expected = rows_of(0).double().mean(0) / 2
            assert torch.equal(model.module.get_buffer("mean"), expected)

    async def test_changed_dtype_without_regroup_is_named(
        self, pair: list[Group]
    ) -> None:
        models = await wrapped(pair, Assigned)

        async def run(rank: int, model: Model) -> None:
            model.double()
            await model.backward(model(rows_of(rank).double()).mean())

        errors = await outcomes(*(run(r, m) for r, m in enumerate(models)))
        assert any(isinstance(error, UsageError) for error in errors)
        text = next(
            str(candidate) for candidate in errors if isinstance(candidate, UsageError)
        )
        assert "has dtype torch.float64 now, but had torch.float32" in text
        assert "regroup" in text

    async def test_buffer_assigned_before_the_meeting_is_sent(
        self, pair: list[Group]
    ) -> None:
        models = [DistributedDataParallel(Assigned(), group) for group in pair]
        for rank, model in enumerate(models):
            model.double()
            model.module.mean = torch.full((2,), 7.0 + rank).double()
        await asyncio.gather(*models)
        for model in models:
            assert model.module.get_buffer("mean").tolist() == [7.0, 7.0]

    @pytest.mark.parametrize("are_sent", [True, False])
    async def test_buffers_within_join_are_those_of_a_rank_with_inputs(
        self,
        pair: list[Group],
        are_sent: bool,  # noqa: FBT001
    ) -> None:
        models = await wrapped(pair, Assigned, broadcast_buffers=are_sent)

        async def run(rank: int, model: Model) -> torch.Tensor:
            async with model.join():
                for _ in range(1 + rank):
                    await model.backward(model(rows_of(rank)).mean())
            return model.module.get_buffer("mean")

        means = await at_all(models, run)
        own = [rows_of(0).mean(0) / 2, rows_of(1).mean(0) * 3 / 4]
        if are_sent:  # the second pass begins with rank 0's, and has rank 1's
            own = [(rows_of(0).mean(0) / 2 + rows_of(1).mean(0)) / 2] * 2
        for mean, wanted in zip(means, own, strict=True):
            assert torch.allclose(mean, wanted)


Program = Callable[[int, Model], Any]


async def twice(rank: int, model: Model) -> None:
    output = model(rows_of(rank))
    await model.backward(output.square().mean(), retain_graph=True)
    await model.backward(output.sin().mean())


async def twice_plainly(rank: int, model: Model) -> None:
    output = model(rows_of(rank))
    losses = output.square().mean(), output.sin().mean()
    await asyncio.to_thread(losses[0].backward, retain_graph=True)
    await asyncio.to_thread(losses[1].backward)


async def two_graphs(rank: int, model: Model) -> None:
    first = model(rows_of(rank)).square().mean()
    second = model(rows_of(rank)).sin().mean()
    await model.backward(first)
    await model.backward(second)


def gradients_alone(make: Callable[[], nn.Module], program: Program) -> Any:
    """Return the gradients that two ranks come to, as one process computes them."""
    module = make()
    for rank in range(2):
        alone = make()
        outputs = [alone(rows_of(rank))]
        outputs.append(alone(rows_of(rank)) if program is two_graphs else outputs[0])
        loss = outputs[0].square().mean() + outputs[1].sin().mean()
        for weight, grad in zip(
            module.parameters(),
            torch.autograd.grad(loss, list(alone.parameters())),
            strict=True,
        ):
            weight.grad = grad / 2 if weight.grad is None else weight.grad + grad / 2
    return [parameter.grad for parameter in module.parameters()]


class TestGraphsThatAreNeededAgain:
    @pytest.mark.parametrize(
        ("make", "program"),
        [
            *itertools.product([normed, Divided], [twice, twice_plainly]),
            (normed, two_graphs),
        ],
    )
    async def test_kept_graphs_use_the_buffers_of_their_forward_pass(
        self, pair: list[Group], make: Callable[[], nn.Module], program: Program
    ) -> None:
        models = await wrapped(pair, make)
        await at_all(models, program)
        expected = gradients_alone(make, program)
        for model in models:
            for parameter, gradient in zip(model.parameters(), expected, strict=True):
                assert parameter.grad is not None
                assert torch.allclose(parameter.grad, gradient, atol=1e-6)
        first, second = (list(model.buffers()) for model in models)
        assert all(map(torch.equal, first, second))

    async def test_kept_graph_leaves_buffers_to_the_next_forward_pass(
        self, pair: list[Group]
    ) -> None:
        models = await wrapped(pair, Divided)

        async def run(rank: int, model: Model) -> torch.Tensor:
            loss = model(rows_of(rank)).mean()
            await model.backward(loss, retain_graph=True)
            model(torch.zeros(1, 2))
            return model.module.get_buffer("largest")

        for largest in await at_all(models, run):
            assert torch.equal(largest, rows_of(0).amax(0).clamp(min=1))

    async def test_kept_graph_fails_when_its_buffer_was_replaced(
        self, pair: list[Group]
    ) -> None:
        """Autograd's own error, in place of gradients by the buffer of another rank."""
        models = await wrapped(pair, Divided)

        async def run(rank: int, model: Model) -> None:
            model.module.get_buffer("largest").fill_(1.0 + rank)
            needed = model(torch.zeros(1, 2)).mean()
            loss = torch.stack(
                [parameter.sum() for parameter in model.parameters()]
            ).sum()
            await model.backward(loss)
            await model.backward(needed)

        errors = await outcomes(*(run(r, m) for r, m in enumerate(models)))
        assert isinstance(errors[0], CollectiveError)
        assert isinstance(errors[1], RuntimeError)
        assert "modified by an inplace operation" in str(errors[1])


class Holding(nn.Module):
    """A buffer, or a parameter, of an unusual kind."""

    def __init__(
        self, buffer: torch.Tensor | None, parameter: torch.Tensor | None = None
    ) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("special", buffer)
        if parameter is not None:
            self.weight = nn.Parameter(parameter)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Map `(batch, 2)` to a scalar."""
        total: torch.Tensor = self.linear(rows).square().sum()
        if "weight" in dict(self.named_parameters()):
            total = total * torch.view_as_real(self.weight.resolve_conj()).sum()
        return total


UNIT = torch.polar(torch.ones(4), torch.arange(4.0))


class TestUnusualTensors:
    @pytest.mark.parametrize(
        "make",
        [
            lambda rank: (UNIT + rank).conj(),
            lambda rank: (UNIT + rank).conj().imag,
            lambda rank: (torch.arange(4.0) + rank).expand(3, 4),
            lambda rank: torch.tensor([[1.0 + rank]]).expand(3, 4),
            lambda rank: torch.tensor(3.0 + rank).expand(2),
            lambda rank: (torch.arange(6.0) + rank).view(2, 3).t(),
            lambda rank: torch.tensor(not rank),
            lambda rank: torch.empty(0, 3 + 0 * rank),
        ],
        ids=["conj", "neg", "expanded", "twice", "scalar", "t", "bool", "empty"],
    )
    async def test_unusual_buffer_is_sent(
        self, pair: list[Group], make: Callable[[int], torch.Tensor]
    ) -> None:
        models = [DistributedDataParallel(Holding(make(g.rank)), g) for g in pair]
        await asyncio.gather(*models)

        async def run(rank: int, model: Model) -> torch.Tensor:
            await model.backward(model(rows_of(rank)))
            return model.module.get_buffer("special")

        for special in await at_all(models, run):
            assert torch.equal(special, make(0))

    async def test_conjugated_parameters_are_trained(self, pair: list[Group]) -> None:
        def make() -> nn.Module:
            torch.manual_seed(1)
            return Holding(None, UNIT.conj())

        models = await wrapped(pair, make)

        async def run(rank: int, model: Model) -> list[torch.Tensor]:
            await model.backward(model(rows_of(rank)))
            return [torch.as_tensor(trained.grad) for trained in model.parameters()]

        alone = make()
        for rank in range(2):
            torch.autograd.backward(alone(rows_of(rank)) / 2)
        for grads in await at_all(models, run):
            for grad, parameter in zip(grads, alone.parameters(), strict=True):
                assert torch.allclose(grad, torch.as_tensor(parameter.grad))

    @pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of its kinds
    @pytest.mark.parametrize(
        ("make", "text"),
        [
            (lambda: torch.eye(4).to_sparse(), "layout torch.sparse_coo"),
            (lambda: torch.eye(4).to_sparse_csr(), "layout torch.sparse_csr"),
            (
                lambda: torch.quantize_per_tensor(torch.ones(4), 1.0, 0, torch.qint8),
                "quantized",
            ),
            (
                lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
                "nested",
            ),
            (
                lambda: masked_tensor(torch.ones(2), torch.ones(2).bool()),
                "MaskedTensor",
            ),
            (nn.parameter.UninitializedBuffer, "no shape yet: run the module once"),
            (lambda: torch.ones(2, device="meta"), "on meta"),
        ],
        ids=["coo", "csr", "quantized", "nested", "wrapper", "lazy", "meta"],
    )
    async def test_unsendable_buffer_is_named(
        self, pair: list[Group], make: Callable[[], torch.Tensor], text: str
    ) -> None:
        with pytest.raises(UsageError, match=text) as caught:
            DistributedDataParallel(Holding(make()), pair[0])
        assert "'special'" in str(caught.value)
        models = await wrapped(pair, lambda: Holding(make()), ignored=["special"])

        async def run(rank: int, model: Model) -> None:
            await model.backward(model(rows_of(rank)))

        await at_all(models, run)
