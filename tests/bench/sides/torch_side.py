"""torch.distributed.rpc on TensorPipe: the rival, used as its tutorials use it.

Source: https://docs.pytorch.org/tutorials/intermediate/rpc_tutorial.html.
"""

from __future__ import annotations

import os
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.distributed import rpc

from tests.bench import workloads as w
from tests.bench.harness import (
    Budget,
    gb_per_second,
    measure,
    p50_p99_us,
    per_second,
)
from tests.bench.processes import report
from tests.bench.sides import training_torch as training
from tests.bench.sides.side import (
    Arguments,
    name_of,
    parse,
    reason_of,
    warm_ups_for,
)
from tests.bench.sides.torch_windows import torch_window

Measured = Callable[[Budget], list[float]]

# torch does not type these.
init_rpc: Any = rpc.init_rpc


def latency(function: Callable[..., Any], args: tuple[Any, ...] = ()) -> Measured:
    def run(budget: Budget) -> list[float]:
        call = partial(rpc.rpc_sync, w.CALLEE, function, args=args)
        return p50_p99_us(measure(call, budget))

    return run


def outstanding(function: Callable[..., Any]) -> Measured:
    def run(budget: Budget) -> list[float]:
        start = partial(rpc.rpc_async, w.CALLEE, function)
        calls = deque(start() for _ in range(w.OUTSTANDING))

        def one_more() -> None:
            calls.popleft().wait()
            calls.append(start())

        times_s = measure(one_more, budget, warm_ups=w.OUTSTANDING)
        for call in calls:
            call.wait()
        return [per_second(times_s)]

    return run


def bandwidth(function: Callable[..., Any], nbytes: int) -> Measured:
    def run(budget: Budget) -> list[float]:
        tensor = torch.ones(nbytes // 4)
        call = partial(rpc.rpc_sync, w.CALLEE, function, args=(tensor,))
        times_s = measure(call, budget, warm_ups=warm_ups_for(nbytes))
        return [gb_per_second(times_s, tensor.nbytes)]

    return run


def fan_out(budget: Budget) -> list[float]:
    tensor = torch.ones((w.FAN_OUT_MIB << 20) // 4)
    peers = [name_of(rank) for rank in (1, 2, 3)]

    def one() -> None:
        calls = [rpc.rpc_async(peer, w.shape_of, args=(tensor,)) for peer in peers]
        for call in calls:
            call.wait()

    times_s = measure(one, budget, warm_ups=warm_ups_for(0))
    return [gb_per_second(times_s, len(peers) * tensor.nbytes)]


def fan_in(budget: Budget) -> list[float]:
    others = [
        rpc.rpc_async(name_of(rank), torch_window, args=(budget.seconds,))
        for rank in (2, 3)
    ]
    rate = torch_window(budget.seconds)
    return [rate + sum(one.wait() for one in others)]


def references(budget: Budget) -> list[float]:
    def one() -> None:
        rref = rpc.remote(w.CALLEE, w.Counter)
        assert rref.rpc_sync().add(2) == 2
        rref.to_here()

    return [per_second(measure(one, budget))]


def kept_reference(budget: Budget) -> list[float]:
    rref = rpc.remote(w.CALLEE, w.Counter)
    return [per_second(measure(lambda: rref.rpc_sync().add(1), budget))]


def measured() -> Mapping[str, Measured]:
    add = latency(w.add_one, (torch.ones(w.KIB_FLOATS),))
    found: dict[str, Measured] = {
        "call_async": latency(w.nothing),
        "call_def": latency(w.nothing),
        "tensor_add": add,
        "many_async": outstanding(w.nothing),
        "many_def": outstanding(w.nothing),
        "callers_3": fan_in,
        "send_64k": bandwidth(w.shape_of, 64 << 10),
        "group": fan_out,
        "rref": references,
        "rref_method": kept_reference,
        **training.measured(),
    }
    for size in w.SIZES_MIB:
        found[f"send_{size}"] = bandwidth(w.shape_of, size << 20)
        found[f"echo_{size}"] = bandwidth(w.echo, size << 20)
    found["huge_256"] = found["send_256"]
    for size in w.TCP_SIZES_MIB:
        found[f"tcp_{size}"] = bandwidth(w.shape_of, size << 20)
    return found


def backend_options(arguments: Arguments) -> rpc.TensorPipeRpcBackendOptions:
    """Return TensorPipe's defaults, or what keeps it to TCP.

    `_transports` and `_channels` have no documentation; torch's own tests use them.
    """
    only_tcp: dict[str, Any] = {"_transports": ["uv"], "_channels": ["basic"]}
    return rpc.TensorPipeRpcBackendOptions(
        init_method=f"tcp://127.0.0.1:{arguments.port}",
        **(only_tcp if arguments.kind == "tcp" else {}),
    )


def lead(arguments: Arguments) -> None:
    """Measure one workload after the other; one that fails leaves the rest."""
    found = measured()
    for name in arguments.workloads:
        try:
            values = found[name](arguments.budget_for(name))
        except Exception as error:  # noqa: BLE001  (it is reported)
            report(name, [], reason_of(error))
        else:
            report(name, values, "")


def main(arguments: Arguments) -> None:
    torch.set_num_threads(1)
    os.environ |= {"TP_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
    # It warns of parts of itself, and resets the filters to be heard.
    warnings.showwarning = lambda *_args, **_kwargs: None
    init_rpc(
        arguments.name,
        rank=arguments.rank,
        world_size=arguments.processes,
        rpc_backend_options=backend_options(arguments),
    )
    if arguments.rank == 0:
        lead(arguments)
    rpc.shutdown()


if __name__ == "__main__":
    main(parse())
