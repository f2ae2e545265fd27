"""What a rank of torch.distributed does with tensors on devices, over asyncrpc.

Each of `CASES` makes its tensors by a function that says where they are: so it can be
run on a device, on the host, and with some on each, and has to give the same.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp
from torch.distributed.distributed_c10d import _coalescing_manager

from asyncrpc import Options
from tests.integration.devices.accelerators import TYPE, set_up
from tests.integration.parallel.collectives.torch_backend.playing import (
    drawn,
    same,
    world,
)
from tests.integration.parallel.collectives.torch_backend.processes import start

HOME = f"{TYPE}:0"
Put = Callable[[torch.Tensor], torch.Tensor]
Found = Sequence[torch.Tensor]
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64)
MOVED = (*DTYPES, torch.bool, torch.complex64, torch.float16, torch.uint8)


def begin(rank: int, size: int, url: str, **options: Any) -> Any:
    """Make the device usable, and the default process group."""
    ledger = set_up()
    torch.ones(1).to(HOME)  # before a backward pass: then torch counts devices
    start(rank, size, url, timeout=timedelta(seconds=60), **options)
    if ledger is not None:
        ledger.clear()
    return ledger


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(HOME)


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def alternating() -> Put:
    """Return what puts every other tensor on the device."""
    count = 0

    def put(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        return tensor.to(HOME) if count % 2 else tensor

    return put


# --- collectives ---------------------------------------------------------------------


def all_reduce(put: Put) -> Found:
    results = []
    for dtype in DTYPES:
        for shape in ((), (0,), (5,), (3, 4), (50_000,)):
            for op in (ReduceOp.SUM, ReduceOp.MAX):
                tensor = put(drawn(*shape).to(dtype))
                dist.all_reduce(tensor, op)
                results.append(tensor)
    average = put(drawn(7))
    dist.all_reduce(average, ReduceOp.AVG)
    leaf = put(drawn(7)).requires_grad_()
    dist.all_reduce(leaf)
    return [*results, average, leaf]


def strided(put: Put) -> Found:
    """Views between others: what is around them stays as it is."""
    whole = put(drawn(6, 8))
    dist.all_reduce(whole.t()[1:4])
    other = put(drawn(6, 8))
    dist.broadcast(other[:, ::2], 1)
    third = put(drawn(6, 8))
    rows = [third[0], third[2]]
    dist.all_gather(rows, put(drawn(8)))
    return [whole, other, third]


def roots(put: Put) -> Found:
    """Functions of which one rank is special."""
    results: list[torch.Tensor] = []
    size, rank = dist.get_world_size(), dist.get_rank()
    for root in range(size):
        for dtype in MOVED:
            shared, mine = put(drawn(3, 2).to(dtype)), put(drawn(3, 2).to(dtype))
            dist.broadcast(shared, root)
            outs = [put(torch.zeros(3, 2).to(dtype)) for _ in range(size)]
            dist.gather(mine, outs if rank == root else None, dst=root)
            part = put(torch.zeros(3, 2).to(dtype))
            parts = [put(drawn(3, 2, seed=peer).to(dtype)) for peer in range(size)]
            dist.scatter(part, parts if rank == root else None, src=root)
            results += [shared, mine, part, *outs, *parts]
        total = put(drawn(40_000))
        dist.reduce(total, root)
        results.append(total)
    return results


def gathers(put: Put) -> Found:
    size = dist.get_world_size()
    results: list[torch.Tensor] = []
    for numel in (5, 40_000):
        mine = put(drawn(numel))
        outs = [put(torch.zeros(numel)) for _ in range(size)]
        flat = put(torch.zeros(size * numel))
        dist.all_gather(outs, mine)
        dist.all_gather_into_tensor(flat, mine)
        part, other = put(torch.zeros(numel)), put(torch.zeros(numel))
        dist.reduce_scatter(part, outs)
        dist.reduce_scatter_tensor(other, flat)
        results += [*outs, flat, part, other]
    return results


def all_to_all(put: Put) -> Found:
    size, rank = dist.get_world_size(), dist.get_rank()
    even, out = put(drawn(2 * size, 3)), put(torch.zeros(2 * size, 3))
    dist.all_to_all_single(out, even)
    rows = [peer + 1 for peer in range(size)]  # rank r sends s + 1 rows to rank s
    uneven, source = put(torch.zeros((rank + 1) * size, 2)), put(drawn(sum(rows), 2))
    dist.all_to_all_single(uneven, source, [rank + 1] * size, rows)
    outs = [put(torch.zeros(rank + 1, 2)) for _ in range(size)]
    parts = torch.split(source.cpu(), rows)
    dist.all_to_all(outs, [put(part) for part in parts])
    return [out, uneven, *outs]


def coalesced(put: Put) -> Found:
    size, rank = dist.get_world_size(), dist.get_rank()
    results: list[torch.Tensor] = []
    device = torch.device("cpu")
    for how in (None, device):
        several = [put(torch.full((n,), float(rank))) for n in (1, 40_000, 3)]
        with _coalescing_manager(device=how):
            for tensor in several:
                dist.all_reduce(tensor)
        outs = [put(torch.zeros(size * n)) for n in (1, 4)]
        with _coalescing_manager(device=how, async_ops=True) as begun:
            for n, out in zip((1, 4), outs, strict=True):
                dist.all_gather_into_tensor(out, put(drawn(n)))
        begun.wait()
        results += [*several, *outs]
    tensors = [put(drawn(2)), put(drawn(3))]
    lists = [[put(torch.zeros(2)), put(torch.zeros(3))] for _ in range(size)]
    work = world().allgather_coalesced(lists, tensors)
    assert work is not None
    work.wait()
    return [*results, *(tensor for its in lists for tensor in its)]


def points(put: Put) -> Found:
    """Every rank sends before it receives: nobody may wait for the other in that."""
    size, rank = dist.get_world_size(), dist.get_rank()
    after, before = (rank + 1) % size, (rank - 1) % size
    results = []
    for numel in (3, 300_000):
        got, batched = put(torch.zeros(numel)), put(torch.zeros(numel))
        works: list[Any] = [
            dist.isend(put(drawn(numel)), after),
            dist.irecv(got, before),
        ]
        for work in works:
            work.wait()
        operations = [
            dist.P2POp(dist.isend, put(drawn(numel)), after),
            dist.P2POp(dist.irecv, batched, before),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        results += [got, batched]
    anyones = put(torch.zeros(4))
    sending: Any = dist.isend(put(drawn(4)), after, tag=3)
    assert dist.recv(anyones, tag=3) == before
    sending.wait()
    return [*results, anyones]


def subgroups(put: Put) -> Found:
    group = dist.new_group([1, 0])
    total = put(drawn(9))
    dist.all_reduce(total, group=group)
    shared = put(drawn(9))
    dist.broadcast(shared, 1, group=group)
    dist.destroy_process_group(group)
    return [total, shared]


def functional(put: Put) -> Found:
    """By torch's C++ code."""
    functions: Any = importlib.import_module(
        "torch.distributed._functional_collectives"
    )
    group = world()
    mine = put(drawn(2, 2))
    total = functions.wait_tensor(functions.all_reduce(mine, "sum", group))
    every = functions.wait_tensor(functions.all_gather_tensor(mine, 0, group))
    part = functions.reduce_scatter_tensor(every, "sum", 0, group)
    several = functions.all_reduce_coalesced([mine, mine * 2], "sum", group)
    rest = [functions.wait_tensor(tensor) for tensor in (part, *several)]
    return [total, every, *rest]


CASES = {
    each.__name__: each
    for each in (
        all_reduce,
        strided,
        roots,
        gathers,
        all_to_all,
        coalesced,
        points,
        subgroups,
    )
}
if TYPE != "xla":  # it puts functions of its own in their place
    CASES["functional"] = functional


def as_on_the_host(
    rank: int, size: int, url: str, options: Options | None, names: Sequence[str]
) -> list[str]:
    """Run cases on a device, and with tensors in both places; compare."""
    ledger = begin(rank, size, url, pg_options=options)
    done = []
    for name in names:
        case = CASES[name]
        wanted = [tensor.detach() for tensor in case(on_host)]
        for put in (on_device, alternating()):
            results = case(put)
            if put is on_device:
                assert {tensor.device.type for tensor in results} == {TYPE}
            same([tensor.detach().cpu() for tensor in results], wanted)
        done.append(name)
    check_hands_off(ledger)
    dist.destroy_process_group()
    return done


def check_hands_off(ledger: Any) -> None:
    """Neither the loop nor two threads at a time have used the device."""
    if ledger is not None:
        assert ledger.operations
        assert ledger.on_loop == []
        assert ledger.overlaps == []


# --- beside collectives --------------------------------------------------------------


def objects_and_barriers(rank: int, size: int, url: str) -> str:
    """torch puts what it sends for them where it asks the group to."""
    begin(rank, size, url)
    dist.all_reduce(on_device(torch.ones(2)))
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": peer} for peer in range(size)]
    shared = ["told"] if rank == 1 else [None]
    dist.broadcast_object_list(shared, src=1)
    assert shared == ["told"]
    dist.barrier()
    world().monitored_barrier()
    assert dist.get_backend() == "asyncrpc"
    dist.destroy_process_group()
    return "done"


def every_way_to_start(rank: int, size: int, url: str) -> str:
    """By its name, and by those of devices; with the one that is used."""
    set_up()
    device = torch.device(HOME)
    ways: list[dict[str, Any]] = [
        {"backend": "asyncrpc"},
        {"backend": f"{TYPE}:asyncrpc"},
        {"backend": f"cpu:asyncrpc,{TYPE}:asyncrpc"},
        {"backend": "asyncrpc", "device_id": device},
    ]
    if TYPE == "xla":
        ways.pop()  # torch 2.9 does not know how many there are
    for turn, way in enumerate(ways):
        dist.init_process_group(
            init_method=f"{url}{turn}", rank=rank, world_size=size, **way
        )
        for put in (on_host, on_device):
            tensor = put(torch.ones(3))
            dist.all_reduce(tensor)
            same(tensor.cpu(), torch.full((3,), float(size)))
        dist.barrier()
        dist.destroy_process_group()
    return "done"


def work_and_futures(rank: int, size: int, url: str, options: Options | None) -> str:
    """What is asked of work: a device's tensor is there as soon as it says so."""
    ledger = begin(rank, size, url, pg_options=options)
    is_exclusive = TYPE == "xla" if options is None else options.devices.exclusive
    total = torch.full((3,), float(size))
    tensor = on_device(torch.ones(3))
    work: Any = dist.all_reduce(tensor, async_op=True)
    while not work.is_completed():
        pass
    assert work.is_success()
    same(tensor.cpu(), total)
    tensor = on_device(torch.ones(3))
    work = dist.all_reduce(tensor, async_op=True)
    future = work.get_future()
    assert future.done() or not is_exclusive
    [result] = future.wait()
    assert result is tensor
    same(tensor.cpu(), total)
    tensor.fill_(9.0)  # what comes once does not come again
    work.wait()
    work.synchronize()
    assert work.result()[0] is tensor
    same(tensor.cpu(), torch.full((3,), 9.0))
    # What was given is what is reduced, whatever becomes of it.
    source = on_device(torch.ones(3))
    outs = [on_device(torch.zeros(3)) for _ in range(size)]
    work = dist.all_gather(outs, source, async_op=True)
    source.fill_(5.0)
    work.wait()
    same([each.cpu() for each in outs], [torch.ones(3)] * size)
    many_waiters()
    tensors = [on_device(torch.full((1 + 97 * n,), float(n))) for n in range(20)]
    works: list[Any] = [dist.all_reduce(each, async_op=True) for each in tensors]
    for each in reversed(works):
        each.wait()
    wanted = [torch.full((1 + 97 * n,), float(size * n)) for n in range(20)]
    same([each.cpu() for each in tensors], wanted)
    check_hands_off(ledger if is_exclusive else None)
    dist.destroy_process_group()
    return "done"


def many_waiters() -> None:
    """Any number of threads may wait for one work; one of them uses the device."""
    tensor = on_device(torch.ones(3))
    work: Any = dist.all_reduce(tensor, async_op=True)
    threads = [threading.Thread(target=work.wait) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    same(tensor.cpu(), torch.full((3,), float(dist.get_world_size())))


def wrong_and_unlike(rank: int, size: int, url: str) -> str:
    """What fails says why, and leaves outputs as they were."""
    begin(rank, size, url)
    outs = [on_device(torch.full((2,), 7.0)) for _ in range(size)]
    with pytest.raises(dist.DistBackendError, match="output 0 is"):
        dist.all_gather(outs, on_device(torch.ones(3)))
    tensor = on_device(torch.ones(5 if rank == 1 else 4))
    with pytest.raises(dist.DistBackendError, match="do not agree"):
        dist.all_reduce(tensor)
    assert bool((tensor == 1.0).all())
    same([each.cpu() for each in outs], [torch.full((2,), 7.0)] * size)
    with pytest.raises(ValueError, match="'meta'"):
        dist.broadcast(torch.ones(2, device="meta"), 0)
    with pytest.raises(ValueError, match="is not 2 times"):
        dist.all_gather_into_tensor(on_device(torch.ones(3)), on_device(torch.ones(2)))
    if TYPE == "xla":
        spoilt = on_device(torch.ones(2, dtype=torch.complex128))
        with pytest.raises(ValueError, match="does not keep its dtype"):
            world().broadcast([spoilt])  # torch's function would take it apart
    work: Any = dist.all_gather(outs, on_device(torch.ones(3)), async_op=True)
    with pytest.raises(RuntimeError, match="output 0 is"):
        work.get_future().wait()
    assert isinstance(work.exception(), dist.DistBackendError)
    if TYPE != "xla":  # it keeps no strides, so it has no such tensors
        refused_by_the_device(size)
    got = on_device(torch.ones(2))
    dist.all_reduce(got)
    same(got.cpu(), torch.full((2,), float(size)))
    dist.destroy_process_group()
    return "done"


def refused_by_the_device(size: int) -> None:
    """What has come does not fit where it is to go: every waiter is told so."""
    outs = [on_device(torch.zeros(1)).expand(3) for _ in range(size)]
    work: Any = dist.all_gather(outs, on_device(torch.ones(3)), async_op=True)
    for _ in range(2):
        with pytest.raises(RuntimeError) as caught:
            work.wait()
        assert "was copied to" in caught.value.__notes__[0]
    assert not work.is_success()
    assert work.exception() is caught.value


def sparse(rank: int, size: int, url: str) -> str:
    """Sums of sparse tensors, on devices that hold them."""
    begin(rank, size, url)

    def build(put: Put) -> torch.Tensor:
        indices = torch.tensor([[rank, 5, 5], [0, rank, rank]])
        values = torch.tensor([1.0, 2.0, 3.0])
        return put(torch.sparse_coo_tensor(indices, values, (7, 4)))

    outcome = "summed"
    wanted = build(on_host)
    dist.all_reduce(wanted)
    try:
        tensor = build(on_device)
    except (RuntimeError, NotImplementedError):
        outcome = "there are none"
    else:
        dist.all_reduce(tensor)
        same(tensor.cpu().to_dense(), wanted.to_dense())
    dist.destroy_process_group()
    return outcome


def in_other_modes(rank: int, size: int, url: str) -> str:
    """What a program has set for its thread is not what our copies are made by."""
    begin(rank, size, url)
    total = torch.full((3,), float(size))

    def run() -> list[torch.Tensor]:
        tensor = torch.ones(3).to(HOME)
        dist.all_reduce(tensor)
        outs = [torch.zeros(3).to(HOME) for _ in range(size)]
        dist.all_gather(outs, tensor)
        work: Any = dist.all_gather(outs, tensor, async_op=True)
        work.get_future().wait()
        dist.send(tensor, 1) if rank == 0 else dist.recv(tensor, 0)
        return [each.cpu() for each in (tensor, *outs)]

    with torch.inference_mode():
        same(run(), [total] * (size + 1))
    with torch.no_grad():
        same(run(), [total] * (size + 1))
    torch.set_default_device(HOME)
    same(run(), [total] * (size + 1))
    torch.set_default_device(None)
    torch.set_default_dtype(torch.float64)
    same(run(), [total.double()] * (size + 1))
    dist.destroy_process_group()
    return "done"


def refused_functional(rank: int, size: int, url: str) -> str:
    """torch_xla would do them without the other process, and not say so."""
    begin(rank, size, url)
    functions: Any = importlib.import_module(
        "torch.distributed._functional_collectives"
    )
    tensor, group = on_device(torch.ones(2)), world()
    calls: list[Callable[[], Any]] = [
        lambda: functions.all_reduce(tensor, "sum", group),
        lambda: functions.all_reduce_coalesced([tensor], "sum", group),
        lambda: functions.all_gather_tensor(tensor, 0, group),
        lambda: functions.reduce_scatter_tensor(tensor, "sum", 0, group),
        lambda: functions.broadcast(tensor, 0, group),
        lambda: functions.all_to_all_single(tensor, [1, 1], [1, 1], group),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="does not use the process group"):
            call()
    total = functions.wait_tensor(functions.all_reduce(torch.ones(2), "sum", group))
    same(total, torch.full((2,), float(size)))
    dist.destroy_process_group()
    # A group of somebody else's is as it was: of its own backend.
    dist.init_process_group(
        "gloo", init_method=f"{url}gloo", rank=rank, world_size=size
    )
    reduced = functions.wait_tensor(
        functions.all_reduce(tensor, "sum", dist.group.WORLD)
    )
    same(reduced.cpu(), torch.ones(2))  # by torch_xla, which knows one replica
    dist.destroy_process_group()
    return "refused"
