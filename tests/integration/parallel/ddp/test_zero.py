"""ZeRO does what the optimizer of one rank does, with a share of the state at each."""

from __future__ import annotations

import asyncio
import copy
import pickle
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import torch

from asyncrpc import Group, UsageError
from asyncrpc.ddp import DistributedDataParallel
from asyncrpc.parallel.ddp.optimizers import shards
from tests.integration.parallel.ddp.ranks import Mlp, groups_of, loss_of, rows
from tests.integration.parallel.ddp.sharing import (
    Parameters,
    Ranks,
    Zero,
    give_gradients,
    make_parameters,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.complex64)


@pytest.fixture
async def groups() -> AsyncIterator[list[Group]]:
    async with groups_of(3) as groups:
        yield groups


def state_numel(optimizer: torch.optim.Optimizer) -> int:
    return sum(
        value.numel()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.dim()
    )


@pytest.mark.parametrize("as_views", [False, True])
class TestSteps:
    @pytest.mark.parametrize("dtypes", [DTYPES[:1], DTYPES])
    async def test_steps_are_bitwise_those_of_one_rank(
        self,
        groups: list[Group],
        dtypes: tuple[torch.dtype, ...],
        as_views: bool,  # noqa: FBT001
    ) -> None:
        ranks = Ranks(
            groups,
            torch.optim.Adam,
            lambda: make_parameters(dtypes),
            as_views=as_views,
            lr=0.02,
        )
        for step in range(3):
            await ranks.step(step)

    async def test_many_parameters_are_sent_in_several_packs(
        self,
        groups: list[Group],
        as_views: bool,  # noqa: FBT001
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(shards, "_PACKED_BYTES", 1 << 19)
        shapes = [(200, 200), (999,)] * 12
        ranks = Ranks(
            groups,
            torch.optim.SGD,
            lambda: make_parameters(DTYPES[:3], shapes),
            as_views=as_views,
            lr=0.1,
        )
        packs = [piece for owned in ranks.zeros[0]._shards._pieces for piece in owned]  # noqa: SLF001
        assert len(packs) == 3 if as_views else len(packs) > 3
        assert any(len(pack.parameters) > 1 and pack.nbytes > 1 << 18 for pack in packs)
        await ranks.step(0)
        await ranks.step(1)

    async def test_steps_work_with_fewer_parameters_than_ranks(
        self,
        groups: list[Group],
        as_views: bool,  # noqa: FBT001
    ) -> None:
        ranks = Ranks(
            groups,
            torch.optim.SGD,
            lambda: make_parameters(shapes=[(5,)]),
            as_views=as_views,
            lr=0.1,
            momentum=0.5,
        )
        await ranks.step(0)
        await ranks.step(1)
        state = await ranks.consolidate(2)
        assert list(state["state"]) == [0]

    async def test_steps_follow_frozen_and_thawed_parameters(
        self,
        groups: list[Group],
        as_views: bool,  # noqa: FBT001
    ) -> None:
        ranks = Ranks(groups, torch.optim.AdamW, as_views=as_views, lr=0.05)
        for step, is_thawed in enumerate((True, False, True)):
            for parameters in (ranks.wanted, *ranks.parameters):
                parameters[0].requires_grad_(is_thawed)
                parameters[0].grad = None
            await ranks.step(step)

    async def test_step_applies_a_leftover_gradient_as_torch_does(
        self,
        groups: list[Group],
        as_views: bool,  # noqa: FBT001
    ) -> None:
        ranks = Ranks(groups, torch.optim.SGD, as_views=as_views, lr=0.05)
        for parameters in (ranks.wanted, *ranks.parameters):
            give_gradients(parameters)
            parameters[1].requires_grad = False
        before = ranks.wanted[1].detach().clone()
        await ranks.step(1)
        assert not torch.equal(before, ranks.wanted[1])
        for parameters in (ranks.wanted, *ranks.parameters):
            parameters[1].grad = None
        await ranks.step(2)

    async def test_step_finds_parameters_with_new_memory(
        self,
        groups: list[Group],
        as_views: bool,  # noqa: FBT001
    ) -> None:
        ranks = Ranks(groups, torch.optim.SGD, as_views=as_views, lr=0.1)
        await ranks.step(0)
        for parameter in ranks.parameters[1]:
            parameter.data = parameter.detach().clone()
        await ranks.step(1)

    async def test_step_makes_earlier_graphs_stale(
        self,
        groups: list[Group],
        as_views: bool,  # noqa: FBT001
    ) -> None:
        ranks = Ranks(groups, torch.optim.SGD, as_views=as_views, lr=0.1)
        losses = [mine[0].square().sum() for mine in ranks.parameters]
        await ranks.step(0)
        for loss in losses:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                torch.autograd.backward(loss)

    async def test_step_includes_groups_added_later(
        self,
        groups: list[Group],
        as_views: bool,  # noqa: FBT001
    ) -> None:
        ranks = Ranks(groups, torch.optim.AdamW, as_views=as_views, lr=0.02)
        await ranks.step(0)
        for optimizer, parameters in zip(
            (ranks.alone, *ranks.zeros), (ranks.wanted, *ranks.parameters), strict=True
        ):
            added = make_parameters(DTYPES, [(30, 30), (1,), (4, 5)])
            optimizer.add_param_group({"params": added, "lr": 0.5})
            parameters.extend(added)
        await ranks.step(1)
        await ranks.step(2)
        state = await ranks.consolidate(0)
        assert str(state) == str(ranks.alone.state_dict())


class TestBuckets:
    async def test_bucket_holds_the_parameters_of_each_owner(
        self, groups: list[Group]
    ) -> None:
        ranks = Ranks(
            groups, torch.optim.SGD, lambda: make_parameters(DTYPES), as_views=True
        )
        for mine in ranks.parameters:
            storages = {
                storage.data_ptr(): storage.nbytes()
                for parameter in mine
                if parameter.numel() and (storage := parameter.untyped_storage())
            }
            assert len(storages) == len(groups)
            # They took the place of the memory that was there, but for alignment.
            nbytes = sum(parameter.nbytes for parameter in mine)
            assert nbytes <= sum(storages.values()) < nbytes + 64 * len(mine)
        await ranks.step()


class TestSchedulers:
    @pytest.mark.parametrize(
        ("kind", "make"),
        [
            (
                torch.optim.AdamW,
                lambda o: torch.optim.lr_scheduler.OneCycleLR(
                    o, max_lr=0.3, total_steps=10
                ),
            ),
            (
                torch.optim.SGD,
                lambda o: torch.optim.lr_scheduler.CyclicLR(
                    o, 0.01, 0.2, step_size_up=2, cycle_momentum=False
                ),
            ),
            (
                torch.optim.SGD,
                lambda o: torch.optim.lr_scheduler.SequentialLR(
                    o,
                    [
                        torch.optim.lr_scheduler.ConstantLR(o),
                        torch.optim.lr_scheduler.ExponentialLR(o, 0.5),
                    ],
                    milestones=[2],
                ),
            ),
        ],
    )
    async def test_schedulers_accept_the_optimizer(
        self,
        groups: list[Group],
        kind: type[torch.optim.Optimizer],
        make: Callable[[Any], Any],
    ) -> None:
        ranks = Ranks(groups, kind, lr=0.1)
        schedulers = [make(rank) for rank in (ranks.alone, *ranks.zeros)]
        for step in range(5):
            await ranks.step(step)
            for scheduler in schedulers:
                scheduler.step()
        lrs = [rank.param_groups[0]["lr"] for rank in (ranks.alone, *ranks.zeros)]
        assert len(set(lrs)) == 1
        assert lrs[0] != 0.1


class TestMemory:
    async def test_state_is_divided_among_ranks(self, groups: list[Group]) -> None:
        shapes = [(40, 50)] * 9 + [(13,)] * 3
        ranks = Ranks(
            groups, torch.optim.Adam, lambda: make_parameters(shapes=shapes), lr=0.1
        )
        await ranks.step()
        whole = state_numel(ranks.alone)
        shares = [state_numel(zero) for zero in ranks.zeros]
        assert shares == [whole // 3] * 3
        for mine, zero in zip(ranks.parameters, ranks.zeros, strict=True):
            keys = {id(parameter) for parameter in mine}
            assert all(id(parameter) in keys for parameter in zero.state)
        owned = [set(zero._places()) for zero in ranks.zeros]  # noqa: SLF001
        assert set.union(*owned) == set(range(len(shapes)))

    async def test_loaded_state_is_divided_among_ranks(
        self, groups: list[Group]
    ) -> None:
        shapes = [(40, 50)] * 6
        ranks = Ranks(
            groups, torch.optim.Adam, lambda: make_parameters(shapes=shapes), lr=0.1
        )
        await ranks.step()
        state = await ranks.consolidate(0)
        ranks.load(state)
        shares = [state_numel(zero) for zero in ranks.zeros]
        assert shares == [state_numel(ranks.alone) // 3] * 3
        # What it took is its own: the checkpoint stays as it is.
        kept = copy.deepcopy(state)
        await ranks.step(1)
        assert str(kept) == str(state)

    async def test_consolidated_state_is_freed_by_the_next_step(
        self, groups: list[Group]
    ) -> None:
        ranks = Ranks(groups, torch.optim.Adam, lr=0.1)
        await ranks.step()
        await ranks.consolidate(1)
        await ranks.step(1)
        with pytest.raises(UsageError, match=r"consolidate_state_dict\(to=1\)"):
            ranks.zeros[1].state_dict()


class TestStates:
    async def test_state_loads_into_another_number_of_ranks(
        self, groups: list[Group]
    ) -> None:
        ranks = Ranks(groups, torch.optim.Adam, lr=0.02)
        await ranks.step(0)
        state = await ranks.consolidate(2)
        async with groups_of(2) as fewer:
            others = Ranks(fewer, torch.optim.Adam, lr=0.5)
            others.load(state)
            others.begin_at(ranks.wanted)
            await others.step(1)
            assert others.zeros[0].param_groups[0]["lr"] == 0.02
        await ranks.step(1)
        assert all(
            torch.equal(mine, wanted)
            for mine, wanted in zip(others.wanted, ranks.wanted, strict=True)
        )

    async def test_consolidated_state_is_a_copy(self, groups: list[Group]) -> None:
        ranks = Ranks(groups, torch.optim.SGD, lr=0.1, momentum=0.9)
        await ranks.step()
        state = await ranks.consolidate(0)
        kept = copy.deepcopy(state)
        await ranks.step(1)
        assert str(kept) == str(state)

    async def test_state_keeps_the_names_of_parameters(
        self, groups: list[Group]
    ) -> None:
        models = [Mlp() for _ in groups]
        alone = torch.optim.SGD(Mlp().named_parameters(), lr=0.1)
        zeros = [
            Zero(model.named_parameters(), torch.optim.SGD, group, lr=0.1)
            for model, group in zip(models, groups, strict=True)
        ]
        await asyncio.gather(*(zero.consolidate_state_dict() for zero in zeros))
        state = zeros[0].state_dict()
        assert state == alone.state_dict()
        zeros[1].load_state_dict(state)
        names = zeros[1].param_groups[0]["param_names"]
        assert names == [name for name, _ in models[1].named_parameters()]

    async def test_state_survives_torch_save_with_weights_only(
        self, groups: list[Group], tmp_path: Any
    ) -> None:
        ranks = Ranks(groups, torch.optim.AdamW, lr=0.02)
        await ranks.step()
        torch.save(await ranks.consolidate(0), tmp_path / "state.pt")
        ranks.load(torch.load(tmp_path / "state.pt", weights_only=True))
        await ranks.step(1)

    async def test_state_methods_call_their_hooks(self, groups: list[Group]) -> None:
        ranks = Ranks(groups, torch.optim.SGD, lr=0.1)
        called = []
        zero = ranks.zeros[0]
        zero.register_state_dict_pre_hook(lambda _: called.append("before saving"))
        zero.register_state_dict_post_hook(lambda _, state: {**state, "more": 1})
        zero.register_load_state_dict_pre_hook(
            lambda _, state: called.append(f"before loading {state['more']}")
        )
        zero.register_load_state_dict_post_hook(lambda _: called.append("loaded"))
        state = await ranks.consolidate(0)
        assert state["more"] == 1
        zero.load_state_dict(state)
        assert called == ["before saving", "before loading 1", "loaded"]

    async def test_state_of_another_optimizer_is_refused(
        self, groups: list[Group]
    ) -> None:
        zero = Zero(make_parameters(), torch.optim.Adam, groups[0])
        other = torch.optim.Adam(make_parameters(shapes=[(3,)])).state_dict()
        with pytest.raises(UsageError, match=r"groups of \[1\] parameters"):
            zero.load_state_dict(other)
        with pytest.raises(UsageError, match="not the state of an optimizer"):
            zero.load_state_dict({"model": 1})


class Steps(torch.optim.SGD):
    """Its step ends when the event loop says so."""

    may_end: threading.Event

    def step(self, closure: Any = None) -> Any:
        """Wait for the loop, then step."""
        assert self.may_end.wait(10)
        return super().step(closure)


class TestLoop:
    async def test_loop_runs_while_the_optimizer_computes(
        self, groups: list[Group]
    ) -> None:
        ranks = Ranks(groups, Steps, lr=0.1)
        inner = [ranks.alone, *(zero.optim for zero in ranks.zeros)]
        optimizers = [
            inner_optimizer
            for inner_optimizer in inner
            if isinstance(inner_optimizer, Steps)
        ]
        for optimizer in optimizers:
            optimizer.may_end = threading.Event()
        optimizers[0].may_end.set()
        steps = asyncio.ensure_future(ranks.step())
        for optimizer in optimizers[1:]:
            await asyncio.sleep(0)  # the loop runs, or this test waits for itself
            optimizer.may_end.set()
        await steps


class TestClosures:
    async def test_coroutine_closure_runs_a_pass_of_all_ranks(
        self, groups: list[Group]
    ) -> None:
        async def run(group: Group) -> list[torch.Tensor]:
            model = await DistributedDataParallel(Mlp(), group)
            zero = Zero(model.parameters(), torch.optim.Adam, group, lr=0.01)

            async def closure() -> torch.Tensor:
                zero.zero_grad()
                loss = loss_of(model(rows(group.rank)))
                await model.backward(loss)
                return loss.detach()

            losses = [await zero.step(closure) for _ in range(4)]
            zero.close()
            model.close()
            return losses

        results = await asyncio.gather(*(run(group) for group in groups))
        of_all = [sum(losses) for losses in zip(*results, strict=True)]
        assert of_all[-1] < of_all[0] / 4

    async def test_function_closure_runs_in_the_thread(
        self, groups: list[Group]
    ) -> None:
        def run(parameters: Parameters, optimizer: Any) -> Any:
            def closure() -> float:
                assert (
                    threading.current_thread() is not threading.main_thread()
                    or optimizer is ranks.alone
                )
                optimizer.zero_grad()
                give_gradients(parameters)
                return 7.0

            return optimizer.step(closure)

        ranks = Ranks(groups, torch.optim.SGD, lr=0.1)
        run(ranks.wanted, ranks.alone)
        assert await asyncio.gather(
            *(
                run(mine, zero)
                for mine, zero in zip(ranks.parameters, ranks.zeros, strict=True)
            )
        ) == [7.0] * len(groups)
        assert ranks.are_equal()

    async def test_step_runs_between_its_hooks(self, groups: list[Group]) -> None:
        ranks = Ranks(groups, torch.optim.SGD, lr=0.1)
        called = []
        before = ranks.parameters[0][0].detach().clone()

        def has_stepped() -> bool:
            return not torch.equal(before, ranks.parameters[0][0])

        zero = ranks.zeros[0]
        zero.register_step_pre_hook(lambda *_: called.append(("before", has_stepped())))
        zero.register_step_post_hook(lambda *_: called.append(("after", has_stepped())))
        await ranks.step()
        assert called == [("before", False), ("after", True)]


class TestParameters:
    async def test_indivisible_parameters_are_refused(
        self, groups: list[Group]
    ) -> None:
        parameter = torch.nn.Parameter(torch.ones(2))
        for parameters, says in (
            ([parameter, parameter], "parameter 1 occurs twice in its group"),
            ([parameter, torch.ones(2, device="meta")], "is on 'meta'"),
            ([torch.ones(2, 2).to_sparse()], "is sparse"),
        ):
            with pytest.raises(UsageError, match=says):
                Zero(parameters, torch.optim.SGD, groups[0], lr=0.1)
        for wrong in ([], [1]):
            with pytest.raises(UsageError, match="params"):
                Zero(wrong, torch.optim.SGD, groups[0], lr=0.1)  # type: ignore[arg-type]

    async def test_refused_group_changes_nothing(self, groups: list[Group]) -> None:
        ranks = Ranks(groups, torch.optim.SGD, lr=0.1)
        for zero in ranks.zeros:
            with pytest.raises(UsageError, match=r"param_group: .*more than one"):
                zero.add_param_group({"params": [zero.param_groups[0]["params"][0]]})
            with pytest.raises(UsageError, match="sparse"):
                zero.add_param_group({"params": [torch.ones(2, 2).to_sparse()]})
        await ranks.step()

    async def test_optimizer_cannot_be_copied(self, groups: list[Group]) -> None:
        zero = Zero(make_parameters(), torch.optim.SGD, groups[0])
        with pytest.raises(UsageError, match="state_dict"):
            copy.deepcopy(zero)
        with pytest.raises(UsageError, match="state_dict"):
            pickle.dumps(zero)
        assert "Parameter Group 0" in repr(zero)
