"""torch.distributed.rpc on TensorPipe: the rival, used as its tutorials use it.

Source: https://docs.pytorch.org/tutorials/intermediate/rpc_tutorial.html.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.distributed import rpc

from tests.bench import workloads as w
from tests.bench.harness import Budget, gb_per_second, measure, per_second
from tests.bench.sides import blocking
from tests.bench.sides import training_torch as training
from tests.bench.sides.blocking import Measured
from tests.bench.sides.side import Arguments, name_of, parse, warm_ups_for
from tests.bench.sides.torch_windows import torch_window

# torch does not type these.
init_rpc: Any = rpc.init_rpc


def bandwidth(function: Callable[..., Any], nbytes: int) -> Measured:
    def run(budget: Budget) -> list[float]:
        tensor = torch.ones(nbytes // 4)
        call = partial(rpc.rpc_sync, w.CALLEE, function, args=(tensor,))
        times_s = measure(call, budget, warm_ups=warm_ups_for(nbytes))
        return [gb_per_second(times_s, tensor.nbytes)]

    return run


def at_once(budget: Budget) -> list[float]:
    tensor = torch.ones((w.AT_ONCE_MIB << 20) // 4)
    start = partial(rpc.rpc_async, w.CALLEE, w.shape_of, args=(tensor,))
    times_s = blocking.window(start, budget, w.AT_ONCE)
    return [per_second(times_s) * tensor.nbytes / 1e9]


def fan_out(mib: int, budget: Budget) -> list[float]:
    tensor = torch.ones((mib << 20) // 4)
    peers = [name_of(rank) for rank in (1, 2, 3)]

    def call_all() -> None:
        calls = [rpc.rpc_async(peer, w.shape_of, args=(tensor,)) for peer in peers]
        for call in calls:
            call.wait()

    times_s = measure(call_all, budget, warm_ups=warm_ups_for(0))
    return [gb_per_second(times_s, len(peers) * tensor.nbytes)]


def fan_in(budget: Budget) -> list[float]:
    others = [
        rpc.rpc_async(name_of(rank), torch_window, args=(budget.seconds,))
        for rank in (2, 3)
    ]
    rate = torch_window(budget.seconds)
    return [rate + sum(other.wait() for other in others)]


def kept_reference(budget: Budget) -> list[float]:
    rref = rpc.remote(w.CALLEE, w.Counter)
    return [per_second(measure(lambda: rref.rpc_sync().add(1), budget))]


def measured() -> Mapping[str, Measured]:
    call = blocking.latency(rpc, w.nothing)
    many = blocking.outstanding(rpc, w.nothing, w.OUTSTANDING)
    workloads: dict[str, Measured] = {
        "call_async": call,
        "call_def": call,
        "tensor_add": blocking.latency(rpc, w.add_one, (torch.ones(w.KIB_FLOATS),)),
        "many_async": many,
        "many_def": many,
        "callers_3": fan_in,
        "send_64k": bandwidth(w.shape_of, 64 << 10),
        "at_once_16": at_once,
        "group": partial(fan_out, w.FAN_OUT_MIB),
        "tcp_group": partial(fan_out, w.TCP_FAN_OUT_MIB),
        "rref": blocking.references(rpc),
        "rref_method": kept_reference,
        **training.measured(),
        **blocking.measured(blocking.torch_names()),
    }
    for size in w.SIZES_MIB:
        workloads[f"send_{size}"] = bandwidth(w.shape_of, size << 20)
        workloads[f"echo_{size}"] = bandwidth(w.echo, size << 20)
    workloads["huge_256"] = workloads["send_256"]
    for size in w.TCP_SIZES_MIB:
        workloads[f"tcp_{size}"] = bandwidth(w.shape_of, size << 20)
        workloads[f"tcp_echo_{size}"] = bandwidth(w.echo, size << 20)
    return workloads


def backend_options(arguments: Arguments) -> rpc.TensorPipeRpcBackendOptions:
    """Return TensorPipe's defaults, or what keeps it to TCP.

    `_transports` and `_channels` have no documentation; torch's own tests use them.
    """
    only_tcp: dict[str, Any] = {"_transports": ["uv"], "_channels": ["basic"]}
    return rpc.TensorPipeRpcBackendOptions(
        init_method=f"tcp://127.0.0.1:{arguments.port}",
        **(only_tcp if arguments.kind in w.TCP_KINDS else {}),
    )


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
        blocking.lead(measured(), arguments)
    rpc.shutdown()


if __name__ == "__main__":
    main(parse())
