"""What goes wrong in a pass is said at every rank, and the next pass goes well."""

from __future__ import annotations

import asyncio
import copy
import pickle
import threading
from collections.abc import AsyncIterator
from contextlib import nullcontext
from typing import Any, cast

import pytest
import torch
from torch import nn

import asyncrpc
from asyncrpc import Group, Options, UsageError
from asyncrpc.ddp import DistributedDataParallel
from asyncrpc.errors import CollectiveError, RankLostError
from asyncrpc.testing import ProcessCluster, acting_as
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
    outcomes,
    rows,
    same,
    wrapped,
)


@pytest.fixture
async def groups() -> AsyncIterator[list[Group]]:
    async with groups_of(3) as groups:
        yield groups


async def backward(rank: int, model: Model) -> None:
    await model.backward(loss_of(model(rows(rank))))


async def goes_well(models: list[Model]) -> None:
    """The next pass comes to what it should."""
    for model in models:
        model.zero_grad()
    await at_all(models, backward)
    assert same(grads_of(models[0]), mean_grads(Mlp, 3))
    assert identical([grads_of(model) for model in models])


class Broken(torch.autograd.Function):
    """Raises in its backward pass."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:  # noqa: ARG004
        raise ArithmeticError("no gradient today")


class Breaking(Mlp):
    """Its graph breaks at one rank: before any gradient comes, or before some do."""

    breaks = ""

    def forward(self, rows: torch.Tensor) -> Any:
        """Map `(batch, 6)` to `(batch, 3)`, in a dictionary."""
        broken: Any = Broken.apply
        hidden = self.first(rows).tanh()
        output = self.second(broken(hidden) if self.breaks == "later" else hidden)
        return {"rows": broken(output) if self.breaks == "at first" else output}


class TestPlainPasses:
    @pytest.mark.parametrize("is_caught", [False, True])
    @pytest.mark.parametrize("breaks", ["at first", "later"])
    async def test_failed_plain_pass_is_known_to_all_ranks(
        self,
        groups: list[Group],
        breaks: str,
        is_caught: bool,  # noqa: FBT001
    ) -> None:
        """The failing rank may begin its next pass at once."""
        models = await wrapped(groups, Breaking)
        mine: Any = models[1].module
        mine.breaks = breaks

        def compute(rank: int, model: Model) -> None:
            loss_of(model(rows(rank))["rows"]).backward()  # type: ignore[no-untyped-call]

        def run(rank: int, model: Model) -> str:
            try:
                compute(rank, model)
            except ArithmeticError:
                mine.breaks = ""
                if is_caught:
                    compute(rank, model)
                return "mine"
            except CollectiveError as error:
                if is_caught:
                    compute(rank, model)
                return str(error)
            return "none"

        results = await asyncio.gather(
            *(asyncio.to_thread(run, rank, m) for rank, m in enumerate(models))
        )
        assert results[1] == "mine"
        for text in (results[0], results[2]):
            assert "rank 1" in text
            assert "raised an error in" in text or "cancelled it" in text
        for model in models:
            if is_caught:
                assert same(grads_of(model), mean_grads(Mlp, 3))
            else:
                assert grads_of(model) == [None] * 4
            model.zero_grad()
        await asyncio.gather(
            *(asyncio.to_thread(compute, rank, m) for rank, m in enumerate(models))
        )
        assert same(grads_of(models[0]), mean_grads(Mlp, 3))
        assert identical([grads_of(model) for model in models])

    async def test_torch_autograd_grad_is_not_a_pass(self, groups: list[Group]) -> None:
        """Its failure is not sent to the other ranks."""
        models = await wrapped(groups, Breaking)
        mine: Any = models[1].module
        inputs = rows(1).requires_grad_()
        for mine.breaks in ("at first", "later", ""):
            for graph_of in (inputs, mine.first.weight):
                loss = loss_of(models[1](inputs)["rows"])
                with pytest.raises(ArithmeticError) if mine.breaks else nullcontext():
                    torch.autograd.grad(loss, graph_of)

        async def run(rank: int, model: Model) -> None:
            loss = loss_of(model(rows(rank))["rows"])
            await asyncio.to_thread(loss.backward)

        await at_all(models, run)
        assert same(grads_of(models[0]), mean_grads(Mlp, 3))


class TestModules:
    async def test_different_modules_are_named(self, groups: list[Group]) -> None:
        modules = [Mlp(), Mlp(), Mlp(41)]
        errors = await outcomes(
            *(
                DistributedDataParallel(m, g)
                for m, g in zip(modules, groups, strict=True)
            )
        )
        for error in errors:
            assert type(error) is UsageError
            assert "rank 2 ('c') has 'first.weight: torch.float32 (41, 6)'" in str(
                error
            )
            assert "rank 0 has 'first.weight: torch.float32 (40, 6)'" in str(error)

    async def test_different_options_are_named(self, groups: list[Group]) -> None:
        errors = await outcomes(
            *(
                DistributedDataParallel(Mlp(), g, static_graph=g.rank == 1)
                for g in groups
            )
        )
        assert all("rank 1 ('b') has 'static_graph = True'" in str(e) for e in errors)

    @pytest.mark.parametrize(
        ("module", "options", "says"),
        [
            (nn.ReLU(), {}, "no parameter of the module needs a gradient"),
            (Mlp(), {"bucket_cap_mb": 0}, "bucket_cap_mb must be a number above 0"),
            (Mlp(), {"ignored": ["third.bias"]}, "'third.bias'"),
            (nn.Linear(2, 2, device="meta"), {}, "'weight' is on meta"),
        ],
    )
    async def test_invalid_module_or_option_is_refused(
        self, groups: list[Group], module: nn.Module, options: Any, says: str
    ) -> None:
        with pytest.raises(UsageError, match=says):
            DistributedDataParallel(module, groups[0], **options)

    async def test_module_must_be_awaited_before_use(self, groups: list[Group]) -> None:
        model = DistributedDataParallel(Mlp(), groups[0])
        with pytest.raises(UsageError, match="await the module first"):
            model(rows(0))

    async def test_module_cannot_be_copied(self, groups: list[Group]) -> None:
        model = DistributedDataParallel(Mlp(), groups[0])
        with pytest.raises(UsageError, match="state_dict"):
            copy.deepcopy(model)
        with pytest.raises(UsageError, match="state_dict"):
            pickle.dumps(model)


class TestPasses:
    async def test_pass_names_a_parameter_without_a_gradient(
        self, groups: list[Group]
    ) -> None:
        models = await wrapped(groups, Branches)

        async def run(rank: int, model: Model) -> None:
            await model.backward(loss_of(model(rows(rank), 0)))

        for error in await outcomes(*(run(r, m) for r, m in enumerate(models))):
            assert isinstance(error, UsageError | CollectiveError)
            assert "'never', 'branches.1.weight', 'branches.1.bias'" in str(error)
        assert all(parameter.grad is None for parameter in models[0].parameters())

    @pytest.mark.parametrize("is_plain", [True, False])
    async def test_pass_that_raises_fails_on_every_rank(
        self,
        groups: list[Group],
        is_plain: bool,  # noqa: FBT001
    ) -> None:
        models = await wrapped(groups, Mlp)

        async def run(rank: int, model: Model) -> None:
            output = model(rows(rank))
            if rank == 1:
                # The second layer gets its gradient, the first does not.
                module = model.module
                assert isinstance(module, Mlp)
                hidden = Broken.apply(module.first(rows(rank)))  # type: ignore[no-untyped-call]
                output = module.second(hidden)
            loss = loss_of(output)
            if is_plain:
                await asyncio.to_thread(loss.backward)
            else:
                await model.backward(loss)

        passes = [asyncio.ensure_future(run(r, m)) for r, m in enumerate(models)]
        with pytest.raises(ArithmeticError, match="no gradient today"):
            await passes[1]
        for rank in (0, 2):
            with pytest.raises(CollectiveError, match=r"rank 1 \('b'\)"):
                await passes[rank]
        assert all(parameter.grad is None for parameter in models[0].parameters())
        await goes_well(models)

    async def test_failed_loss_fails_the_pass_on_every_rank(
        self, groups: list[Group]
    ) -> None:
        models = await wrapped(groups, Mlp)
        await at_all(models, backward)

        async def run(rank: int, model: Model) -> None:
            def compute() -> torch.Tensor:
                if rank == 1:
                    raise ArithmeticError("no loss today")
                return loss_of(model(rows(rank)))

            await model.backward(compute)

        errors = await outcomes(*(run(r, m) for r, m in enumerate(models)))
        assert str(errors[1]) == "no loss today"
        for rank in (0, 2):
            assert isinstance(errors[rank], CollectiveError)
            assert "rank 1 ('b')" in str(errors[rank])
        await goes_well(models)

    @pytest.mark.parametrize("result", [None, torch.ones(1), torch.ones(2, 3)])
    async def test_invalid_loss_is_named_and_fails_on_every_rank(
        self, groups: list[Group], result: Any
    ) -> None:
        models = await wrapped(groups, Mlp)
        await at_all(models, backward)

        async def run(rank: int, model: Model) -> None:
            await model.backward(
                lambda: result if rank == 1 else loss_of(model(rows(rank)))
            )

        errors = await outcomes(*(run(r, m) for r, m in enumerate(models)))
        with pytest.raises(UsageError, match=r"^loss must "):
            raise cast("BaseException", errors[1])
        for rank in (0, 2):
            assert isinstance(errors[rank], CollectiveError)
            assert "rank 1 ('b')" in str(errors[rank])
        await goes_well(models)

    @pytest.mark.parametrize(
        ("loss", "gradient", "says"),
        [
            (torch.ones(2), None, "^loss must require a gradient"),
            (torch.ones(2, requires_grad=True), None, "is not a scalar: pass its grad"),
            (torch.ones(2, requires_grad=True), torch.ones(3), "^gradient must have"),
            ("text", None, "^loss must be a tensor"),
            (
                [torch.ones(1, requires_grad=True)],
                [None, None],
                "each of the 1 losses, not 2",
            ),
        ],
    )
    async def test_refused_pass_changes_no_rank(
        self, groups: list[Group], loss: Any, gradient: Any, says: str
    ) -> None:
        models = await wrapped(groups, Mlp)
        with pytest.raises(UsageError, match=says):
            await models[1].backward(loss, gradient)
        await goes_well(models)

    async def test_pass_cancelled_in_its_loss_fails_on_every_rank(
        self, groups: list[Group]
    ) -> None:
        models = await wrapped(groups, Mlp)
        begun, may_go = threading.Event(), threading.Event()

        async def run(rank: int, model: Model) -> None:
            def compute() -> torch.Tensor:
                if rank == 0:
                    begun.set()
                    assert may_go.wait(30)
                return loss_of(model(rows(rank)))

            await model.backward(compute)

        passes = [asyncio.ensure_future(run(r, m)) for r, m in enumerate(models)]
        await asyncio.to_thread(begun.wait)
        passes[0].cancel()
        await asyncio.sleep(0)
        may_go.set()
        errors = await outcomes(*passes)
        assert type(errors[0]) is asyncio.CancelledError
        for error in errors[1:]:
            assert isinstance(error, CollectiveError)
            assert "rank 0 ('a')" in str(error)
        await goes_well(models)

    async def test_cancelled_pass_fails_on_every_rank(
        self, groups: list[Group]
    ) -> None:
        models = await wrapped(groups, Mlp)
        await at_all(models, backward)
        waiting = [asyncio.ensure_future(backward(r, models[r])) for r in (0, 1)]
        await asyncio.sleep(0)  # they begin
        waiting[0].cancel()
        errors = await outcomes(*waiting, backward(2, models[2]))
        assert type(errors[0]) is asyncio.CancelledError
        for error in errors[1:]:
            assert isinstance(error, CollectiveError)
            assert "rank 0 ('a')" in str(error)
        await goes_well(models)

    async def test_plain_pass_on_the_loop_is_refused(self, groups: list[Group]) -> None:
        models = await wrapped(groups, Mlp)
        loss = loss_of(models[0](rows(0)))
        with pytest.raises(UsageError, match=r"await module.backward\(loss\)"):
            torch.autograd.backward(loss)
        await goes_well(models)

    async def test_second_pass_at_once_is_refused(self, groups: list[Group]) -> None:
        models = await wrapped(groups, Mlp)

        async def run(rank: int, model: Model) -> None:
            running = asyncio.ensure_future(backward(rank, model))
            await asyncio.sleep(0)  # it begins
            with pytest.raises(UsageError, match="is running"):
                await backward(rank, model)
            await running

        await at_all(models, run)
        assert same(grads_of(models[0]), mean_grads(Mlp, 3))

    async def test_pass_with_repeated_gradients_is_refused(
        self, groups: list[Group]
    ) -> None:
        class Twice(Mlp):
            def forward(self, rows: torch.Tensor) -> torch.Tensor:
                rows = rows.requires_grad_()
                first: torch.Tensor
                second: torch.Tensor
                first, second = (
                    torch.utils.checkpoint.checkpoint(
                        super(Twice, self).forward, rows, use_reentrant=True
                    )
                    for _ in range(2)
                )
                return first + second

        models = await wrapped(groups, Twice)
        for error in await outcomes(*(backward(r, m) for r, m in enumerate(models))):
            assert isinstance(error, UsageError | CollectiveError)
        with pytest.raises(UsageError, match="use_reentrant"):
            await outcomes_of_first(models)

    async def test_changed_static_graph_is_refused(self, groups: list[Group]) -> None:
        models = await wrapped(groups, Branches, static_graph=True)

        async def run(rank: int, model: Model, branch: int) -> None:
            await model.backward(loss_of(model(rows(rank), branch)))

        await at_all(models, lambda rank, model: run(rank, model, 0))
        errors = await outcomes(*(run(r, m, int(r == 1)) for r, m in enumerate(models)))
        for error in errors:
            assert isinstance(error, UsageError | CollectiveError)
        assert isinstance(errors[1], UsageError)
        assert "the graph is not static: 'branches.1." in str(errors[1])


kept: dict[str, Model] = {}  # of a process, between two calls


async def meet(members: list[str]) -> bool:
    """Train a step; say whether it came to what it should."""
    group = Group(asyncrpc.current_worker(), members, timeout_s=60.0)
    kept["model"] = await DistributedDataParallel(Mlp(), group)
    await backward(group.rank, kept["model"])
    return same(grads_of(kept["model"]), mean_grads(Mlp, group.size))


def begun() -> int:
    group = kept["model"]._reducer.exchange.group  # noqa: SLF001
    return group._matching.machine.operations.begun  # noqa: SLF001


async def go_on() -> str:
    """Wait for a rank that never comes; say how that ends."""
    model = kept["model"]
    with pytest.raises(RankLostError) as caught:
        await backward(model.group.rank, model)
    with pytest.raises(RankLostError):
        await backward(model.group.rank, model)
    return str(caught.value)


async def test_killed_rank_fails_the_pass_and_survivors_train_on() -> None:
    options = Options(drain_timeout_s=0.5)
    cluster = ProcessCluster(["b", "c"], options=options, method="forkserver")
    async with cluster as worker:
        cluster.expect_death("c")
        with acting_as(worker):
            b, c = worker.peer("b"), worker.peer("c")
            all_ = [worker.name, "b", "c"]
            assert all(
                await asyncio.gather(meet(all_), b.call(meet, all_), c.call(meet, all_))
            )
            before = begun()
            both = asyncio.gather(b.call(go_on), go_on())
            while begun() == before or await b.call(begun) == before:  # noqa: ASYNC110  the other is a process
                await asyncio.sleep(0)
            cluster.kill("c")
            for text in await both:
                assert "rank 2 ('c')" in text
            left = all_[:2]
            assert all(await asyncio.gather(meet(left), b.call(meet, left)))
            kept.clear()


async def outcomes_of_first(models: list[Model]) -> None:
    """Raise what rank 0 comes to."""
    results = await outcomes(*(backward(r, m) for r, m in enumerate(models)))
    raise next(result for result in results if isinstance(result, UsageError))
