"""What goes wrong in a shared-out optimizer is said everywhere, and can be mended."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch

import asyncrpc
from asyncrpc import Group, Options, UsageError
from asyncrpc.errors import CollectiveError, OptimizerError, RankLostError
from asyncrpc.testing import ProcessCluster, acting_as
from tests.integration.parallel.ddp.ranks import groups_of, outcomes
from tests.integration.parallel.ddp.sharing import (
    Ranks,
    Zero,
    give_gradients,
    make_parameters,
    same_bits,
)


@pytest.fixture
async def groups() -> AsyncIterator[list[Group]]:
    async with groups_of(3) as groups:
        yield groups


class Broken(torch.optim.SGD):
    """Its step raises, if it is told to, when it has changed something."""

    is_broken = False

    def step(self, closure: Any = None) -> Any:
        """Step, and then maybe raise."""
        loss = super().step(closure)
        if self.is_broken:
            raise ArithmeticError("no step today")
        return loss


class TestRanksThatDiffer:
    @pytest.mark.parametrize(
        ("odd", "says"),
        [
            (
                lambda g: Zero(
                    make_parameters(shapes=[(3,), (3, 4)]), torch.optim.SGD, g, lr=0.1
                ),
                "'parameter 1 of group 0: torch.float32 (3, 4)' where",
            ),
            (
                lambda g: Zero(
                    make_parameters(shapes=[(3,)]), torch.optim.SGD, g, lr=0.1
                ),
                "no 'parameter 1 of group 0: torch.float32 (4, 3)'",
            ),
            (
                lambda g: Zero(
                    make_parameters(shapes=[(3,), (4, 3)]), torch.optim.SGD, g, lr=0.2
                ),
                "'lr of group 0 = 0.2' where rank 0 has 'lr of group 0 = 0.1'",
            ),
            (
                lambda g: Zero(
                    make_parameters(shapes=[(3,), (4, 3)]), torch.optim.Adam, g, lr=0.1
                ),
                "'the optimizer = torch.optim.adam.Adam' where",
            ),
        ],
        ids=["shape", "number", "option", "class"],
    )
    async def test_rank_that_differs_is_named_with_its_difference(
        self, groups: list[Group], odd: Any, says: str
    ) -> None:
        def right(group: Group) -> Zero:
            parameters = make_parameters(shapes=[(3,), (4, 3)])
            give_gradients(parameters)
            return Zero(parameters, torch.optim.SGD, group, lr=0.1)

        zeros = [right(groups[0]), odd(groups[1]), right(groups[2])]
        before = [
            parameter.detach().clone()
            for parameter in zeros[0].param_groups[0]["params"]
        ]
        for error in await outcomes(*(zero.step() for zero in zeros)):
            assert type(error) is UsageError
            assert f"rank 1 ('b') has {says}" in str(error)
        after = zeros[0].param_groups[0]["params"]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))

    async def test_different_frozen_parameters_fail_on_every_rank(
        self, groups: list[Group]
    ) -> None:
        ranks = Ranks(groups, torch.optim.SGD, lr=0.1)
        await ranks.step()
        ranks.parameters[1][0].requires_grad = False
        ranks.parameters[1][0].grad = None
        for error in await outcomes(*(zero.step() for zero in ranks.zeros)):
            assert isinstance(error, CollectiveError)
            assert "rank 1 ('b')" in str(error)
        ranks.parameters[1][0].requires_grad = True
        await asyncio.gather(*(zero.synchronize() for zero in ranks.zeros))
        assert same_bits(ranks.parameters)

    async def test_different_calls_fail_on_every_rank(
        self, groups: list[Group]
    ) -> None:
        ranks = Ranks(groups, torch.optim.SGD, lambda: make_parameters(shapes=[(3,)]))
        await ranks.step()
        first, *others = ranks.zeros
        errors = await outcomes(
            first.consolidate_state_dict(0), *(zero.step() for zero in others)
        )
        assert all(isinstance(error, CollectiveError) for error in errors)
        assert "rank 0 ('a')" in str(errors[1])


class TestStepsThatFail:
    async def test_failed_step_fails_on_every_rank_and_is_mended(
        self, groups: list[Group]
    ) -> None:
        ranks = Ranks(groups, Broken, lr=0.1, momentum=0.9)
        await ranks.step(0)
        ranks.give_gradients(1)
        broken = ranks.zeros[1].optim
        assert isinstance(broken, Broken)
        broken.is_broken = True
        errors = await outcomes(*(zero.step() for zero in ranks.zeros))
        assert type(errors[1]) is ArithmeticError
        for error in (errors[0], errors[2]):
            assert isinstance(error, CollectiveError)
            assert "rank 1 ('b') failed in its `step`" in str(error)
            assert "no step today" in str(error)
        for zero in ranks.zeros:
            with pytest.raises(
                OptimizerError, match=r"await optimizer.synchronize\(\)"
            ):
                await zero.step()
            with pytest.raises(OptimizerError, match="last `step` did not end"):
                await zero.consolidate_state_dict()
        # Every owner had made its step, so nothing of it is lost.
        broken.is_broken = False
        await asyncio.gather(*(zero.synchronize() for zero in ranks.zeros))
        ranks.alone.step()
        assert ranks.are_equal()
        await ranks.step(2)

    async def test_failed_step_is_forgotten_after_a_load(
        self, groups: list[Group]
    ) -> None:
        ranks = Ranks(groups, Broken, lr=0.1, momentum=0.9)
        await ranks.step(0)
        state = await ranks.consolidate(0)
        values = [parameter.detach().clone() for parameter in ranks.wanted]
        broken = ranks.zeros[2].optim
        assert isinstance(broken, Broken)
        broken.is_broken = True
        ranks.give_gradients(1)
        await outcomes(*(zero.step() for zero in ranks.zeros))
        broken.is_broken = False
        ranks.load(state)
        ranks.begin_at(values)
        await ranks.step(1)

    async def test_closure_that_raises_fails_the_step_on_every_rank(
        self, groups: list[Group]
    ) -> None:
        ranks = Ranks(groups, torch.optim.SGD, lr=0.1)

        async def closure() -> None:
            raise ArithmeticError("no loss today")

        ranks.give_gradients()
        errors = await outcomes(
            ranks.zeros[0].step(closure), *(zero.step() for zero in ranks.zeros[1:])
        )
        assert type(errors[0]) is ArithmeticError
        assert all("rank 0 ('a')" in str(error) for error in errors[1:])

    async def test_hook_with_an_invalid_result_fails_the_step(
        self, groups: list[Group]
    ) -> None:
        ranks = Ranks(groups, torch.optim.SGD, lr=0.1)
        await ranks.step()
        for zero in ranks.zeros:
            zero.register_step_pre_hook(lambda *_: 3)  # type: ignore[arg-type]  # wrong
        for error in await outcomes(*(zero.step() for zero in ranks.zeros)):
            assert isinstance(error, UsageError | CollectiveError)
        # Nothing had begun.
        await asyncio.gather(*(zero.synchronize() for zero in ranks.zeros))
        assert ranks.are_equal()

    async def test_cancelled_step_ends_after_the_inner_optimizer(
        self, groups: list[Group]
    ) -> None:
        class Slow(torch.optim.SGD):
            """Its step waits until it may end."""

            begun: threading.Event
            may_end: threading.Event

            def step(self, closure: Any = None) -> Any:
                """Say that it has begun, wait, and step."""
                self.begun.set()
                assert self.may_end.wait(10)
                return super().step(closure)

        ranks = Ranks(groups, Slow, lr=0.1)
        slow: list[Any] = [ranks.alone, *(zero.optim for zero in ranks.zeros)]
        for optimizer in slow:
            optimizer.begun, optimizer.may_end = threading.Event(), threading.Event()
        ranks.give_gradients()
        steps = [asyncio.ensure_future(zero.step()) for zero in ranks.zeros]
        await asyncio.to_thread(slow[1].begun.wait, 10)
        steps[0].cancel()
        await asyncio.sleep(0)
        steps[0].cancel()  # which does not leave the thread alone either
        await asyncio.sleep(0)
        assert not steps[0].done()
        for optimizer in slow:
            optimizer.may_end.set()
        errors = await outcomes(*steps)
        assert type(errors[0]) is asyncio.CancelledError
        for error in errors[1:]:
            assert "rank 0 ('a') cancelled its `step`" in str(error)
        ranks.alone.step()
        await asyncio.gather(*(zero.synchronize() for zero in ranks.zeros))
        assert ranks.are_equal()
        await ranks.step(1)

    async def test_step_cancelled_while_sending_is_mended(
        self, groups: list[Group]
    ) -> None:
        ranks = Ranks(groups, torch.optim.SGD, lr=0.1)
        await ranks.step()
        ranks.give_gradients(1)
        for at in range(1, 40, 3):  # turns of the loop; at 0 it would not have begun
            steps = [asyncio.ensure_future(zero.step()) for zero in ranks.zeros]
            for _ in range(at):
                await asyncio.sleep(0)
            steps[2].cancel()
            errors = await outcomes(*steps)
            if all(error is None for error in errors):
                continue
            assert isinstance(errors[2], asyncio.CancelledError | type(None))
            for error in errors[:2]:
                # Another may have failed by it, and its end may have come before.
                words = "" if error is None else str(error)
                assert not words or "rank 2 ('c')" in words or "has closed" in words
            # Some may have ended it, and know nothing: they are met all the same.
            await asyncio.gather(*(zero.synchronize() for zero in ranks.zeros))
            assert same_bits(ranks.parameters)

    async def test_concurrent_steps_are_refused(self, groups: list[Group]) -> None:
        ranks = Ranks(groups, torch.optim.SGD, lr=0.1)
        ranks.give_gradients()
        state = ranks.alone.state_dict()
        steps = [asyncio.ensure_future(zero.step()) for zero in ranks.zeros]
        await asyncio.sleep(0)
        with pytest.raises(UsageError, match="`step` of this optimizer is under way"):
            await ranks.zeros[0].step()
        with pytest.raises(UsageError, match="under way"):
            ranks.zeros[0].load_state_dict(state)
        with pytest.raises(UsageError, match="under way"):
            ranks.zeros[0].add_param_group({"params": [torch.ones(2)]})
        await asyncio.gather(*steps)
        ranks.alone.step()
        assert ranks.are_equal()


class TestStates:
    async def test_missing_state_is_explained(self, groups: list[Group]) -> None:
        ranks = Ranks(groups, torch.optim.SGD, lr=0.1)
        await ranks.step()
        await ranks.consolidate(0)
        with pytest.raises(UsageError, match=r"consolidate_state_dict\(to=2\)"):
            ranks.zeros[2].state_dict()
        with pytest.raises(UsageError, match="to must be a rank from 0 to 2, not 3"):
            await ranks.zeros[0].consolidate_state_dict(3)

    async def test_state_with_unsafe_values_is_refused(
        self, groups: list[Group]
    ) -> None:
        ranks = Ranks(groups, torch.optim.SGD, lr=0.1, momentum=0.9)
        await ranks.step()
        for zero in ranks.zeros:
            for state in zero.state.values():
                state["seen"] = threading.Event
        errors = await outcomes(
            *(zero.consolidate_state_dict(0) for zero in ranks.zeros)
        )
        assert type(errors[0]) is OptimizerError
        assert "the state of rank 1 ('b') must have only tensors" in str(errors[0])
        # The parameters are the same everywhere, so training goes on.
        for zero in ranks.zeros:
            for state in zero.state.values():
                del state["seen"]
        await asyncio.gather(*(zero.synchronize() for zero in ranks.zeros))
        await ranks.step(1)

    async def test_state_without_a_parameter_is_refused(
        self, groups: list[Group]
    ) -> None:
        ranks = Ranks(groups, torch.optim.SGD, lr=0.1)
        ranks.zeros[2].state["round"] = {"number": 1}
        errors = await outcomes(
            *(zero.consolidate_state_dict(0) for zero in ranks.zeros)
        )
        assert type(errors[2]) is UsageError
        assert "'round', which belongs to no parameter" in str(errors[2])
        assert "rank 2 ('c')" in str(errors[0])


async def test_rank_that_closes_its_optimizer_is_named(groups: list[Group]) -> None:
    ranks = Ranks(groups, torch.optim.SGD, lr=0.1)
    await ranks.step()
    ranks.zeros[1].close()
    ranks.zeros[1].close()
    errors = await outcomes(*(zero.step() for zero in ranks.zeros))
    assert type(errors[1]) is UsageError
    assert "was closed" in str(errors[1])
    for error in (errors[0], errors[2]):
        assert isinstance(error, CollectiveError)
        assert "rank 1 ('b')" in str(error)


kept: dict[str, Any] = {}  # of a process, between two calls


async def meet(members: list[str], state: Any = None) -> Any:
    """Make an optimizer, take up a state, and step; return the state at rank 0."""
    # With the first optimizer of a process torch imports its compiler: for seconds, in
    # which the loop would answer nobody.
    await asyncio.to_thread(torch.optim.SGD, make_parameters(), 0.1)
    group = Group(asyncrpc.current_worker(), members, timeout_s=60.0)
    parameters = make_parameters()
    zero = Zero(parameters, torch.optim.Adam, group, lr=0.1)
    if state is not None:
        zero.load_state_dict(state)
    give_gradients(parameters)
    await zero.step()
    kept["zero"], kept["group"] = zero, group
    await zero.consolidate_state_dict(0)
    return zero.state_dict() if group.rank == 0 else None


def begun() -> int:
    group = kept["zero"]._own.enter()  # noqa: SLF001
    begun: int = group._matching.machine.operations.begun  # noqa: SLF001
    return begun


async def go_on() -> str:
    """Step with a rank that never comes; say how that ends."""
    with pytest.raises(RankLostError) as caught:
        await kept["zero"].step()
    return str(caught.value)


async def test_survivors_of_a_lost_rank_continue_from_a_checkpoint() -> None:
    options = Options(drain_timeout_s=0.5)
    cluster = ProcessCluster(["b", "c"], options=options, method="forkserver")
    async with cluster as worker:
        cluster.expect_death("c")
        with acting_as(worker):
            b, c = worker.peer("b"), worker.peer("c")
            all_ = [worker.name, "b", "c"]
            state, *_ = await asyncio.gather(
                meet(all_), b.call(meet, all_), c.call(meet, all_)
            )
            before = begun()
            both = asyncio.gather(b.call(go_on), go_on())
            while begun() == before or await b.call(begun) == before:  # noqa: ASYNC110  the other is a process
                await asyncio.sleep(0)
            cluster.kill("c")
            for text in await both:
                assert "rank 2 ('c')" in text
            left = all_[:2]
            state, _ = await asyncio.gather(
                meet(left, state), b.call(meet, left, state)
            )
            assert {int(values["step"]) for values in state["state"].values()} == {2}
            kept.clear()
