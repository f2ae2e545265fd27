"""What programs of torch.distributed.rpc do, with any module that has its names.

The rival runs this with torch's own module, the facade with `asyncrpc.compat.rpc`: so
each line that is measured is the same.  All of it blocks the thread that calls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed import rpc as torch_rpc

from tests.bench import training as t
from tests.bench import workloads as w
from tests.bench.harness import Budget, measure, p50_p99_us, per_second
from tests.bench.processes import report
from tests.bench.sides import training_torch
from tests.bench.sides.side import Arguments, reason_of

Measured = Callable[[Budget], list[float]]


def latency(
    rpc: Any, function: Callable[..., Any], args: tuple[Any, ...] = ()
) -> Measured:
    def run(budget: Budget) -> list[float]:
        call = partial(rpc.rpc_sync, w.CALLEE, function, args=args)
        return p50_p99_us(measure(call, budget))

    return run


def outstanding(rpc: Any, function: Callable[..., Any], count: int) -> Measured:
    """Measure the rate of one thread that keeps so many calls in flight."""

    def run(budget: Budget) -> list[float]:
        start = partial(rpc.rpc_async, w.CALLEE, function)
        return [per_second(window(start, budget, count))]

    return run


def window(start: Callable[[], Any], budget: Budget, count: int) -> list[float]:
    """Keep `count` calls in flight; return the seconds from answer to answer."""
    calls = deque(start() for _ in range(count))

    def one_more() -> None:
        calls.popleft().wait()
        calls.append(start())

    times_s = measure(one_more, budget, warm_ups=count)
    for call in calls:
        call.wait()
    return times_s


def references(rpc: Any) -> Measured:
    def run(budget: Budget) -> list[float]:
        def use_reference() -> None:
            rref = rpc.remote(w.CALLEE, w.Counter)
            assert rref.rpc_sync().add(2) == 2
            rref.to_here()

        return [per_second(measure(use_reference, budget))]

    return run


def training_steps(names: Any) -> Measured:
    """Measure steps of a layer on the callee, as torch's tutorials write them."""

    def run(budget: Budget) -> list[float]:
        layer = names.rpc.remote(w.CALLEE, w.Layer)
        parameters = names.rpc.rpc_sync(w.CALLEE, names.parameter_rrefs, args=(layer,))
        optimizer = names.optimizer(torch.optim.SGD, parameters, lr=t.LEARNING_RATE)
        rows = torch.randn(t.BATCH, t.FEATURES)

        def step() -> None:
            with names.context() as context_id:
                out = layer.rpc_sync().forward(rows)
                names.backward(context_id, [out.pow(2).mean()])
                optimizer.step(context_id)

        return [per_second(measure(step, budget))]

    return run


def measured(names: Any) -> Mapping[str, Measured]:
    """Return what both the facade and torch measure, by its name."""
    rpc = names.rpc
    kib = torch.ones(w.KIB_FLOATS)
    return {
        "facade_call": latency(rpc, w.nothing),
        "facade_tensor": latency(rpc, w.add_one, (kib,)),
        "facade_builtin": latency(rpc, torch.add, (kib, 1)),
        "facade_many": outstanding(rpc, w.nothing, w.FACADE_OUTSTANDING),
        "facade_rref": references(rpc),
        "facade_train": training_steps(names),
    }


def lead(workloads: Mapping[str, Measured], arguments: Arguments) -> None:
    """Measure one workload after the other; one that fails leaves the rest."""
    for name in arguments.workloads:
        try:
            values = workloads[name](arguments.budget_for(name))
        except Exception as error:  # noqa: BLE001  (it is reported)
            report(name, [], reason_of(error))
        else:
            report(name, values, "")


# --- the names that such a program needs ----------------------------------------------


def torch_names() -> Any:
    """Torch's; its optimizer's steps run compiled, where a mark has no place."""
    return SimpleNamespace(
        rpc=torch_rpc,
        context=training_torch.context,
        backward=training_torch.backward,
        optimizer=training_torch.make_optimizer,
        parameter_rrefs=training_torch.parameter_rrefs,
        marks_steps=False,
    )


def facade_names() -> Any:
    from asyncrpc.compat import autograd, optim, rpc  # noqa: PLC0415  (of this side)

    return SimpleNamespace(
        rpc=rpc,
        context=autograd.context,
        backward=autograd.backward,
        optimizer=optim.DistributedOptimizer,
        parameter_rrefs=facade_parameter_rrefs,
        marks_steps=True,
    )


def facade_parameter_rrefs(rref: Any) -> Any:
    from asyncrpc.compat import rpc  # noqa: PLC0415  (of this side)

    return [rpc.RRef(parameter) for parameter in rref.local_value().parameters()]
