"""A result is received into the caller's own tensor, and nothing else ever is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch

import asyncrpc
from asyncrpc import CallFuture, LimitOptions, Options, Outcome, UsageError, Worker
from asyncrpc.core.options import CallOptions
from asyncrpc.errors import OutMismatchError
from asyncrpc.testing import Cluster
from asyncrpc.testing.cluster import Wires
from tests.integration.core import remote
from tests.integration.core.conftest import Trio

MIB = 1 << 20
SMALL, LARGE = 100, 3 * MIB  # one with its message, one in chunks


@pytest.fixture
async def wired(wires: Wires) -> AsyncIterator[Trio]:
    """Three workers whose payloads go by the wires, not by shared memory."""
    options = Options(drain_timeout_s=2.0, limits=LimitOptions(shared_memory_bytes=0))
    async with Cluster(3, network=wires, options=options) as (a, b, c):
        yield a, b, c


def start(a: Worker, out: Any, function: Any, *args: Any) -> CallFuture[Any]:
    return a.parts.start_call("b", function, args, options=CallOptions(out=out))


def holds(tensor: torch.Tensor, value: float) -> bool:
    """Say whether all elements are `value`; pytest would print a tensor in full."""
    return bool((tensor == value).all())


async def begun(call: CallFuture[Any], out: torch.Tensor) -> None:
    """Wait until some of a result has landed; the memory itself is the only sign."""
    while not out[0] and not call.done():  # noqa: ASYNC110
        await asyncio.sleep(0)


@pytest.mark.parametrize("elements", [0, 1, SMALL, 16384, 16385, LARGE])
async def test_result_is_the_out_tensor(wired: Trio, elements: int) -> None:
    a, _, _ = wired
    out = torch.empty(elements)
    where = out.data_ptr()
    call = start(a, out, torch.arange, float(elements))
    assert await call is out
    assert out.data_ptr() == where
    assert torch.equal(out, torch.arange(float(elements)))
    assert call.stats.bytes_received == out.nbytes


async def test_out_may_be_reused(wired: Trio) -> None:
    a, _, _ = wired
    out = torch.empty(LARGE)
    peer = a.peer("b").using(out=out)
    for value in (1.0, 2.0, 3.0):
        assert await peer.call(torch.full, (LARGE,), value) is out
        assert holds(out, value)


async def test_a_small_result_is_copied_once_out_of_the_read_buffer(trio: Trio) -> None:
    call = start(trio[0], torch.empty(SMALL), torch.ones, SMALL)
    await call
    assert call.stats.bytes_copied == call.stats.bytes_received == 4 * SMALL


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.bfloat16, torch.bool, torch.complex64, torch.float8_e4m3fn],
)
async def test_result_of_any_dtype_is_received(trio: Trio, dtype: torch.dtype) -> None:
    value = torch.arange(24.0).reshape(2, 3, 4).to(dtype)
    out = torch.empty(2, 3, 4, dtype=dtype)
    assert await trio[0].peer("b").using(out=out).call(remote.echo, value) is out
    carrier = {1: torch.uint8, 2: torch.int16, 8: torch.int64}[dtype.itemsize]
    assert torch.equal(out.view(carrier), value.view(carrier))


class TestResultsThatLieOtherwise:
    """They are copied into the tensor, which is counted."""

    @pytest.mark.parametrize("size", [16, 1024])
    async def test_transposed_result_is_received(self, wired: Trio, size: int) -> None:
        """The bytes arrive in the tensor first, in another order."""
        value = torch.rand(size, size)
        out = torch.empty(size, size)
        call = start(wired[0], out, remote.echo, value.t())
        assert await call is out
        assert torch.equal(out, value.t())
        assert call.stats.bytes_copied >= 2 * out.nbytes

    @pytest.mark.parametrize("size", [16, 1024])
    async def test_conjugate_result_is_received(self, trio: Trio, size: int) -> None:
        value = torch.rand(size, size, dtype=torch.complex64)
        out = torch.empty_like(value)
        assert await start(trio[0], out, remote.echo, value.conj()) is out
        assert not out.is_conj()
        assert torch.equal(out, value.conj())

    async def test_expanded_result_is_received(self, trio: Trio) -> None:
        out = torch.zeros(50, 20)
        value = torch.arange(20.0).expand(50, 20)
        assert await start(trio[0], out, remote.echo, value) is out
        assert torch.equal(out, value)

    @pytest.mark.parametrize("rows", [10, 30_000])
    async def test_column_receives_a_result(self, wired: Trio, rows: int) -> None:
        table = torch.zeros(rows, 4)
        call = start(wired[0], table[:, 2], torch.arange, float(rows))
        await call
        assert torch.equal(table[:, 2], torch.arange(float(rows)))
        assert not table[:, [0, 1, 3]].any()
        assert call.stats.bytes_copied >= 4 * rows

    async def test_transposed_out_receives_a_result(self, trio: Trio) -> None:
        base = torch.zeros(7, 5)
        value = torch.rand(5, 7)
        await start(trio[0], base.t(), remote.echo, value)
        assert torch.equal(base, value.t())

    async def test_result_by_shared_memory_is_received(self) -> None:
        async with Cluster(2, network="uds") as (a, _):
            out = torch.empty(LARGE)
            for value in (1.0, 2.0, 3.0, 4.0):
                assert await start(a, out, torch.full, (LARGE,), value) is out
                assert holds(out, value)

    async def test_long_copy_is_done_in_pieces(self, a: Worker) -> None:
        """A result that comes some other way is copied in pieces."""
        value = torch.rand(8 * MIB)
        call: CallFuture[Any] = CallFuture(loop=a.loop, function="f", to="b")
        out = torch.empty(8 * MIB)
        asyncrpc.core.calls.destination.Destination(out).deliver(call, value, [])
        assert not call.done()
        assert await call is out
        assert torch.equal(out, value)
        assert call.stats.bytes_copied == out.nbytes

    async def test_cancelled_copy_writes_no_more(self, a: Worker) -> None:
        call: CallFuture[Any] = CallFuture(loop=a.loop, function="f", to="b")
        out = torch.zeros(8 * MIB)
        asyncrpc.core.calls.destination.Destination(out).deliver(
            call, torch.ones(8 * MIB), []
        )
        call.cancel()
        seen = out.clone()
        for _ in range(50):
            await asyncio.sleep(0)
        assert torch.equal(out, seen)
        assert not bool(out.all())


class TestResultsThatDoNotFit:
    @pytest.mark.parametrize(
        ("function", "args", "text"),
        [
            (torch.ones, (4, 3), r"float32 of shape \(4, 3\).* float32 of shape \(3, "),
            (torch.zeros, (12,), r"shape \(12,\)"),
            (remote.echo, (torch.ones(3, 4).double(),), "float64"),
            (remote.echo, (torch.ones(3, 4, dtype=torch.int32),), "int32"),
            (remote.echo, ([torch.ones(3, 4)],), "a list"),
            (remote.echo, (None,), "a NoneType"),
            (remote.echo, (b"x" * 48,), "a bytes"),
            (remote.echo, (torch.eye(3, 4).to_sparse(),), "not a dense tensor"),
        ],
    )
    async def test_mismatch_error_names_result_and_out(
        self, trio: Trio, function: Any, args: tuple[Any, ...], text: str
    ) -> None:
        call = start(trio[0], torch.empty(3, 4), function, *args)
        with pytest.raises(OutMismatchError, match=text) as caught:
            await call
        assert caught.value.outcome is Outcome.EXECUTED
        assert caught.value.to == "b"
        assert caught.value.function in {"ones", "zeros", "echo"}

    async def test_error_of_the_function_is_raised(self, wired: Trio) -> None:
        with pytest.raises(ValueError, match="later"):
            await start(wired[0], torch.empty(3), remote.fail)
        assert not wired[0].parts.directory.find("b").link.connection.incoming.claims  # type: ignore[union-attr]


class TestTensorsThatAreRefused:
    @pytest.mark.parametrize(
        ("make", "text"),
        [
            (lambda: [1, 2], "out must be a tensor or None"),
            (lambda: torch.ones(3, requires_grad=True), "must not require a gradient"),
            (lambda: torch.ones(3, requires_grad=True) * 2, "not require a gradient"),
            (lambda: torch.ones(1).expand(3), "share memory"),
            (lambda: torch.ones(9).as_strided((4, 4), (1, 1)), "share memory"),
            (lambda: torch.ones(9).as_strided((3, 3), (2, 2)), "share memory"),
            (lambda: torch.eye(3).to_sparse(), "dense"),
            (lambda: torch.empty(3, device="meta"), "host memory"),
            (lambda: torch.ones(3, dtype=torch.complex64).conj(), "conjugate"),
        ],
    )
    async def test_invalid_out_is_refused_before_sending(
        self, a: Worker, b: Worker, make: Any, text: str
    ) -> None:
        await a.peer("b").call(remote.add, 1)
        calls_before = a.parts.directory.find("b").link.pending._next_id  # type: ignore[union-attr]  # noqa: SLF001
        with pytest.raises(UsageError, match=text):
            await a.peer("b").using(out=make()).call(remote.add, 1)
        assert a.parts.directory.find("b").link.pending._next_id == calls_before  # type: ignore[union-attr]  # noqa: SLF001
        assert not b.parts.active

    @pytest.mark.parametrize(
        "make",
        [
            lambda: torch.ones(2, 3).t(),
            lambda: torch.ones(8)[::2],
            lambda: torch.ones(3, 1).expand(3, 1),
            lambda: torch.ones(2, 3, 4).permute(2, 0, 1)[::3],
            lambda: torch.nn.Parameter(torch.ones(3), requires_grad=False),
            lambda: torch.ones(3, requires_grad=True).detach(),
        ],
    )
    async def test_unusual_out_is_accepted(self, trio: Trio, make: Any) -> None:
        out = make()
        value = torch.rand(out.shape)
        assert await trio[0].peer("b").using(out=out).call(remote.echo, value) is out
        assert torch.equal(out, value)

    async def test_remote_and_stream_refuse_out(self, trio: Trio) -> None:
        peer = trio[0].peer("b").using(out=torch.empty(3))
        with pytest.raises(UsageError, match="`remote` cannot receive a result"):
            peer.remote(torch.ones, 3)
        with pytest.raises(UsageError, match="`stream` cannot receive a result"):
            await anext(peer.stream(remote.count_to, 3))


class TestGradients:
    async def test_a_result_with_a_graph_is_refused(self, a: Worker) -> None:
        x = torch.ones(3, requires_grad=True)
        with asyncrpc.testing.cluster.acting_as(a):
            async with asyncrpc.autograd.context():
                with pytest.raises(OutMismatchError, match="to an autograd graph"):
                    await start(a, torch.empty(3), remote.double, x)

    async def test_result_without_graph_is_received_in_context(self, a: Worker) -> None:
        with asyncrpc.testing.cluster.acting_as(a):
            async with asyncrpc.autograd.context():
                out = torch.empty(3)
                assert await start(a, out, remote.double, torch.ones(3)) is out
                assert torch.equal(out, torch.full((3,), 2.0))

    async def test_parameter_is_received_as_a_plain_tensor(self, trio: Trio) -> None:
        out = torch.empty(2, 2)
        value = torch.nn.Parameter(torch.rand(2, 2))
        assert await start(trio[0], out, remote.echo, value) is out
        assert not out.requires_grad
        assert torch.equal(out, value)

    @pytest.mark.parametrize("elements", [SMALL, LARGE])
    async def test_autograd_sees_changed_out(self, trio: Trio, elements: int) -> None:
        out = torch.ones(elements)
        weight = torch.ones(elements, requires_grad=True)
        loss = (weight * out).sum()  # keeps `out` for its backward
        await start(trio[0], out, torch.zeros, elements)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.backward(loss)


class TestReferences:
    @pytest.mark.parametrize("elements", [SMALL, LARGE])
    async def test_to_here_fetches_into_out(self, wired: Trio, elements: int) -> None:
        a, _, _ = wired
        out = torch.empty(elements)
        assert await a.peer("b").remote(torch.ones, elements).to_here(out=out) is out
        assert torch.equal(out, torch.ones(elements))

    async def test_to_here_on_the_owner_copies(self, a: Worker) -> None:
        with asyncrpc.testing.cluster.acting_as(a):
            value, out = torch.rand(3), torch.empty(3)
            rref = asyncrpc.RRef(value)
            assert await rref.to_here(out=out) is out
            assert torch.equal(out, value)
            with pytest.raises(OutMismatchError, match=r"shape \(3,\)"):
                await rref.to_here(out=torch.empty(4))
            with pytest.raises(UsageError, match="must not require a gradient"):
                await rref.to_here(out=torch.empty(3, requires_grad=True))

    async def test_to_here_refuses_an_invalid_out(self, trio: Trio) -> None:
        rref = trio[0].peer("b").remote(torch.ones, 3)
        with pytest.raises(UsageError, match="share memory"):
            await rref.to_here(out=torch.ones(1).expand(3))
        with pytest.raises(OutMismatchError, match=r"shape \(3,\)"):
            await rref.to_here(out=torch.empty(4))


async def under_way(a: Worker) -> tuple[CallFuture[Any], torch.Tensor]:
    """Begin a call whose long result has come in part."""
    await a.peer("b").call(remote.add, 1)
    out = torch.zeros(16 * MIB)
    call = start(a, out, torch.ones, 16 * MIB)
    await begun(call, out)
    return call, out


class TestGivingUp:
    """However a call ends, its tensor is the caller's own again."""

    @pytest.mark.parametrize("turns", [0, 1, 3, 10])
    async def test_cancelled_call_writes_no_more_into_out(
        self, wired: Trio, turns: int
    ) -> None:
        """Part of the result has arrived."""
        a, _, _ = wired
        call, out = await under_way(a)
        link = a.parts.directory.find("b").link
        for _ in range(turns):
            await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert not out[-1]
        out.fill_(7.0)
        await self.all_has_come(a)
        assert holds(out, 7.0)
        assert a.parts.directory.find("b").link is link

    async def all_has_come(self, a: Worker) -> None:
        """What was on its way is behind us once a payload as long has come."""
        assert holds(await a.peer("b").call(torch.ones, 16 * MIB), 1.0)

    @pytest.mark.parametrize("turns", [0, 1, 2, 5, 20])
    async def test_call_cancelled_before_its_result_writes_nothing(
        self, wired: Trio, turns: int
    ) -> None:
        a, _, _ = wired
        await a.peer("b").call(remote.add, 1)
        out = torch.full((LARGE,), 7.0)
        call = start(a, out, torch.ones, LARGE)
        for _ in range(turns):
            await asyncio.sleep(0)
        if call.cancel():
            seen = out.clone()
            await self.all_has_come(a)
            assert torch.equal(out, seen)

    async def test_expired_call_writes_no_more_into_out(self, wired: Trio) -> None:
        a, _, _ = wired
        call, out = await under_way(a)
        a.parts.directory.find("b").link.calls._expire(call)  # type: ignore[union-attr]  # noqa: SLF001
        with pytest.raises(TimeoutError):
            await call
        out.fill_(7.0)
        await self.all_has_come(a)
        assert holds(out, 7.0)

    async def test_call_of_a_lost_peer_writes_no_more_to_out(self, wired: Trio) -> None:
        a, b, _ = wired
        call, out = await under_way(a)
        for link in b.parts.directory.links:
            link.connection.fail(asyncrpc.errors.ConnectionLostError("cut by the test"))
        with pytest.raises(asyncrpc.WorkerLostError):
            await call
        out.fill_(7.0)
        for _ in range(100):
            await asyncio.sleep(0)
        assert holds(out, 7.0)

    async def test_cancelled_call_leaves_no_claims(self) -> None:
        options = Options(limits=LimitOptions(receive_pool_bytes=0))
        async with Cluster(2, options=options) as (a, _):
            await a.peer("b").call(remote.add, 1)
            for turns in (1, 5, 50, 500):
                call = start(a, torch.empty(LARGE), torch.ones, LARGE)
                for _ in range(turns):
                    await asyncio.sleep(0)
                call.cancel()
            await start(a, torch.empty(LARGE), torch.ones, LARGE)
            connection: Any = a.parts.directory.find("b").link.connection  # type: ignore[union-attr]
            assert connection.incoming.claims == {}
