"""Hooks as groups and modules use them: bindings, wrong uses, cancellation."""

from __future__ import annotations

import asyncio
import pickle
import threading
from typing import Any

import pytest
import torch

from asyncrpc import Group, UsageError
from asyncrpc.ddp import (
    CompressionStats,
    GradBucket,
    HookState,
    PostLocalSGDState,
    PowerSGDState,
    allreduce_hook,
    batched_powerSGD_hook,
    bf16_compress_hook,
    fp16_compress_hook,
    fp16_compress_wrapper,
    noop_hook,
    post_localSGD_hook,
    powerSGD_hook,
)
from asyncrpc.errors import CollectiveError
from asyncrpc.parallel.ddp.hooks.states import bound
from asyncrpc.parallel.ddp.threads import in_thread
from tests.integration.parallel.ddp.ranks import groups_of


def bucket_of(numel: int, dtype: torch.dtype = torch.float32) -> GradBucket:
    buffer = torch.ones(numel, dtype=dtype)
    return GradBucket(0, buffer, [torch.empty(numel)], is_last=True)


class TestStates:
    async def test_state_none_means_the_group_of_the_module(self) -> None:
        async with groups_of(1) as (group,):
            assert bound(None, group, []) is group
            own = object()
            assert bound(own, group, []) is own
            state = PowerSGDState(None)
            assert bound(state, group, []) is state
            assert state.group is group
            assert state.process_group is None

    async def test_group_of_the_state_overrides_that_of_the_module(self) -> None:
        async with groups_of(1) as (group,):
            other = group.subgroup([0], name="other")
            state = PostLocalSGDState(other, None, 1)
            assert bound(state, group, []) is state
            assert state.group is other

    async def test_parameters_are_numbered_by_their_order_in_the_module(self) -> None:
        async with groups_of(1) as (group,):
            parameters = [torch.empty(1) for _ in range(4)]
            state = HookState(None)
            state.bind(group, parameters)
            assert state.numbers_of(parameters[::-1]) == (3, 2, 1, 0)
            state.bind(group, list(parameters))
            assert state.parameter(2) is parameters[2]
            state.bind(group, parameters[2:])
            assert state.numbers_of(parameters[2:]) == (0, 1)

    def test_parameters_without_a_module_are_numbered_in_order(self) -> None:
        parameters = [torch.empty(1) for _ in range(4)]
        state = HookState(None)
        assert state.numbers_of(parameters[2:]) == (0, 1)
        assert state.numbers_of(parameters) == (2, 3, 0, 1)

    def test_invalid_options_of_states_are_refused(self) -> None:
        for options in (
            {"start_powerSGD_iter": 1},
            {"start_powerSGD_iter": 0, "warm_start": False},
            {"start_powerSGD_iter": 0, "use_error_feedback": False},
            {"matrix_approximation_rank": 0},
        ):
            with pytest.raises(UsageError, match=r"must be|at least 1"):
                PowerSGDState(None, **options)  # type: ignore[arg-type]  # one is int, one bool
        with pytest.raises(UsageError, match="-1"):
            PostLocalSGDState(None, None, -1)
        freely: dict[str, Any] = {"use_error_feedback": False, "warm_start": False}
        assert PowerSGDState(None, start_powerSGD_iter=0, **freely).iter == 0


class TestWrongUse:
    @pytest.mark.parametrize(
        "hook", [allreduce_hook, fp16_compress_hook, bf16_compress_hook]
    )
    @pytest.mark.parametrize("state", [None, 3])
    async def test_state_without_a_group_is_refused(
        self, hook: Any, state: Any
    ) -> None:
        with pytest.raises(
            UsageError, match="not None" if state is None else "of type int"
        ):
            await hook(state, bucket_of(4))

    @pytest.mark.parametrize("dtype", [torch.complex64, torch.int32])
    async def test_hooks_refuse_buckets_that_are_not_real(
        self, dtype: torch.dtype
    ) -> None:
        async with groups_of(1) as (group,):
            for hook in (fp16_compress_hook, fp16_compress_wrapper(allreduce_hook)):
                with pytest.raises(UsageError, match="half precision"):
                    await hook(group, bucket_of(4, dtype))
            state = PowerSGDState(group)
            for power in (powerSGD_hook, batched_powerSGD_hook):
                with pytest.raises(UsageError, match="real numbers"):
                    await power(state, bucket_of(4, dtype))

    async def test_wrapper_refuses_an_invalid_hook(self) -> None:
        def plain(state: Any, bucket: GradBucket) -> Any:
            return bucket.buffer()

        async def short(state: Any, bucket: GradBucket) -> torch.Tensor:
            return bucket.buffer()[:2]

        for hook, says in ((plain, "coroutine function"), (short, "4 elements")):
            bucket = bucket_of(4)
            buffer = bucket.buffer()
            with pytest.raises(UsageError, match=says):
                await fp16_compress_wrapper(hook)(None, bucket)
            assert bucket.buffer() is buffer

    async def test_restored_state_needs_its_subgroup_set(self) -> None:
        async with groups_of(1) as (group,):
            state = PostLocalSGDState(group, group.subgroup([0], name="s"), 0)
            restored = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(state))))
            restored.process_group = group
            with pytest.raises(UsageError, match="set `subgroup`"):
                await post_localSGD_hook(restored, bucket_of(4))
            restored.subgroup = group
            await post_localSGD_hook(restored, bucket_of(4))


class TestHooks:
    async def test_wrapped_hook_sees_halves_and_may_return_any_dtype(self) -> None:
        seen = []

        async def doubled(state: str, bucket: GradBucket) -> torch.Tensor:
            seen.append((state, bucket.buffer().dtype))
            return bucket.buffer().double() * 2

        bucket = bucket_of(4)
        buffer = bucket.buffer()
        result = await fp16_compress_wrapper(doubled)("mine", bucket)
        assert result is buffer
        assert result.tolist() == [2.0] * 4
        assert bucket.buffer() is buffer
        assert seen == [("mine", torch.float16)]

    async def test_noop_hook_sends_nothing(self) -> None:
        bucket = bucket_of(4)
        assert await noop_hook(None, bucket) is bucket.buffer()

    async def test_sums_in_half_precision_do_not_overflow(self) -> None:
        async with groups_of(4) as groups:
            buckets = [bucket_of(4, torch.float16) for _ in groups]
            for bucket in buckets:
                bucket.buffer().fill_(60_000.0)
            await asyncio.gather(*map(allreduce_hook, groups, buckets))
            assert all((summed.buffer() == 60_000.0).all() for summed in buckets)

    async def test_local_sgd_averages_within_a_host(self) -> None:
        """The hook makes a subgroup of the host once; here it has all ranks."""
        async with groups_of(3) as groups:
            states = [PostLocalSGDState(None, None, 1) for _ in groups]
            for group, state in zip(groups, states, strict=True):
                bound(state, group, [])
            for _ in range(3):
                buckets = [bucket_of(4) for _ in groups]
                for group, bucket in zip(groups, buckets, strict=True):
                    bucket.buffer().fill_(group.rank)
                await asyncio.gather(*map(post_localSGD_hook, states, buckets))
                assert all((averaged.buffer() == 1.0).all() for averaged in buckets)
            assert [state.iter for state in states] == [1, 1, 1]

    @pytest.mark.parametrize("hook", [powerSGD_hook, batched_powerSGD_hook])
    async def test_a_bucket_may_be_empty_or_have_one_number(self, hook: Any) -> None:
        freely: dict[str, Any] = {"use_error_feedback": False, "warm_start": False}
        async with groups_of(2) as groups:
            for shape in ((0,), (), (1,), (3, 0)):
                states = [
                    PowerSGDState(group, start_powerSGD_iter=0, **freely)
                    for group in groups
                ]
                buckets = [
                    GradBucket(
                        0,
                        torch.full(shape, float(group.rank)).view(-1),
                        [torch.empty(shape)],
                        is_last=True,
                    )
                    for group in groups
                ]
                reduced = await asyncio.gather(*map(hook, states, buckets))
                assert all(
                    torch.allclose(tensor, torch.tensor(0.5)) for tensor in reduced
                )

    async def test_zero_gradient_stays_zero_and_is_logged_once(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with groups_of(2) as groups:
            states = [
                PowerSGDState(group, start_powerSGD_iter=2, min_compression_rate=1)
                for group in groups
            ]
            for _ in range(5):
                buckets = [
                    GradBucket(0, torch.zeros(600), [torch.empty(20, 30)], is_last=True)
                    for _ in groups
                ]
                results = await asyncio.gather(*map(powerSGD_hook, states, buckets))
                assert all((result == 0).all() for result in results)
        assert caplog.text.count("columns of zeros") == len(groups)

    async def test_rates_are_logged_at_the_chosen_interval(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("INFO", "asyncrpc")
        async with groups_of(1) as (group,):
            state = PowerSGDState(
                group,
                start_powerSGD_iter=2,
                min_compression_rate=1,
                compression_stats_logging_frequency=3,
            )
            for _ in range(9):
                bucket = GradBucket(
                    0, torch.randn(600), [torch.empty(20, 30)], is_last=True
                )
                await powerSGD_hook(state, bucket)
            assert state.compression_stats() == CompressionStats(12.0, 4200, 350)
        said = [message for message in caplog.messages if "elements before" in message]
        assert [line.split(":")[0] for line in said] == [
            f"PowerSGD at step {step}" for step in (2, 5, 8)
        ]
        assert "after 2 steps" in caplog.text


class TestEnds:
    async def test_cancelled_wait_lasts_until_its_thread_ends(self) -> None:
        begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()

        def job() -> None:
            begun.set()
            go_on.wait(60.0)
            ended.set()

        task = asyncio.create_task(in_thread(job))
        await asyncio.to_thread(begun.wait, 60.0)
        task.cancel()
        await asyncio.sleep(0)
        task.cancel()  # once more, while it waits for the thread
        await asyncio.sleep(0)
        assert not task.done()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended.is_set()

    async def test_error_in_a_thread_is_raised(self) -> None:
        def job() -> None:
            raise ValueError("here")

        with pytest.raises(ValueError, match="here"):
            await in_thread(job)

    @pytest.mark.parametrize("hook", [powerSGD_hook, batched_powerSGD_hook])
    async def test_cancelled_hook_fails_on_every_rank(self, hook: Any) -> None:
        async with groups_of(2) as groups:
            states = [
                PowerSGDState(group, start_powerSGD_iter=2, min_compression_rate=1)
                for group in groups
            ]
            for _ in range(3):
                buckets = [bucket_of(600) for _ in groups]
                await asyncio.gather(*map(hook, states, buckets))
            before = begun(groups[0])
            alone = asyncio.create_task(hook(states[0], bucket_of(600)))
            while begun(groups[0]) == before:  # noqa: ASYNC110  a thread is before it
                await asyncio.sleep(0)
            alone.cancel()
            with pytest.raises(asyncio.CancelledError):
                await alone
            with pytest.raises(CollectiveError, match="cancelled"):
                await hook(states[1], bucket_of(600))


def begun(group: Group) -> int:
    return group._matching.machine.operations.begun  # noqa: SLF001
