"""What torch calls back in a pass may wait, also by the futures of the facade.

Two processes: worker0 plays, worker1 has the hooks.  The loop runs, from the first time
on, whatever it is allowed to run.
"""

from __future__ import annotations

import asyncio
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import asyncrpc
from asyncrpc.autograd import current_context
from asyncrpc.compat import autograd, rpc
from asyncrpc.compat.optim import DistributedOptimizer
from asyncrpc.core.autograd.inline import InlinePolicy
from tests.callbacks_of_steps import STEPS
from tests.callbacks_of_torch import WAYS
from tests.integration.compat.playing import play

ACTS = ("future", "sync", "context", "pass", "pass by a future", "sleep", "raise")


class Served:
    """What worker1 keeps between calls."""

    def __init__(self) -> None:
        self.stack = ExitStack()
        self.forward: Any = None
        self.act = ""
        self.seen: list[tuple[bool, str, int]] = []
        self.is_acting = False
        # Torch's profilers end in the thread that began them, or the process may crash.
        self._thread = ThreadPoolExecutor(max_workers=1)

    def begin(self, way: AbstractContextManager[Any]) -> Any:
        """Leave the way before, and enter this one."""
        return self._thread.submit(self._begin, way).result()

    def _begin(self, way: AbstractContextManager[Any]) -> Any:
        self.stack.close()
        return self.stack.enter_context(way)

    def callback(self) -> None:
        if self.is_acting:
            return
        self.is_acting = True
        try:
            self._act()
        finally:
            self.is_acting = False

    def _act(self) -> None:
        try:
            asyncio.get_running_loop()
            is_on_loop = True
        except RuntimeError:
            is_on_loop = False
        name, serial = asyncrpc.current_worker().name, current_context().id.serial
        self.seen.append((is_on_loop, name, serial))
        if is_on_loop or len(self.seen) > 1:
            return
        with torch.enable_grad():
            self._wait()

    def _wait(self) -> None:
        if self.act == "future":
            assert rpc.rpc_async("worker0", max, args=(1, 2)).wait() == 2
        elif self.act == "sync":
            assert rpc.rpc_sync("worker0", max, args=(1, 2)) == 2
        elif self.act == "context":
            a_pass("worker0", torch.sum)
        elif self.act == "pass":
            rpc.rpc_sync("worker0", a_pass, args=("worker1", served_forward))
        elif self.act == "pass by a future":
            rpc.rpc_async("worker0", a_pass, args=("worker1", served_forward)).wait()
        elif self.act == "sleep":
            time.sleep(0.001)
        elif self.act == "raise":
            raise ValueError("said by a callback")


served = Served()
weight = nn.Parameter(torch.ones(3))
optimizers: list[torch.optim.Optimizer] = []


def a_pass(to: str, function: Any) -> None:
    """Run a pass in a context of its own."""
    with autograd.context() as context_id:
        x = torch.ones(3, requires_grad=True)
        autograd.backward(context_id, [rpc.rpc_sync(to, function, args=(x,))])
        assert x in autograd.get_gradients(context_id)


# --- worker1 -------------------------------------------------------------------------


def served_forward(x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = served.forward(x)
    return loss


def run_all_on_the_loop() -> None:
    InlinePolicy.is_short = lambda *_: True  # type: ignore[method-assign]


def begin_way(name: str) -> None:
    warnings.simplefilter("ignore")  # torch's, of old hooks and replaced kernels
    served.forward = served.begin(WAYS[name](served.callback))


def begin_step(name: str) -> None:
    served.begin(STEPS[name](served.callback, optimizers[-1]))


def begin_act(act: str) -> None:
    served.act, served.seen = act, []


def end() -> list[tuple[bool, str, int]]:
    return served.seen


def make_sgd(parameters: Any) -> torch.optim.Optimizer:
    optimizers.append(torch.optim.SGD(parameters, lr=0.1))
    return optimizers[-1]


def weighed(x: torch.Tensor) -> torch.Tensor:
    return (x * weight).sum()


def weight_reference() -> Any:
    return rpc.RRef(weight)


# --- worker0 -------------------------------------------------------------------------


def check(context_id: int, where: Any) -> None:
    seen = rpc.rpc_sync("worker1", end)
    assert seen, where
    assert set(seen) == {(False, "worker1", context_id)}, where


def outcome_of(act: str) -> AbstractContextManager[Any]:
    """Return a context that expects the error of a callback that raises."""
    said = r"(?s)(?!.*in part).*said by a callback"
    return pytest.raises(RuntimeError, match=said) if act == "raise" else nullcontext()


def passes_of_every_way() -> None:
    rpc.rpc_sync("worker1", run_all_on_the_loop)
    for name in WAYS:
        rpc.rpc_sync("worker1", begin_way, args=(name,))
        for act in ACTS:
            rpc.rpc_sync("worker1", begin_act, args=(act,))
            x = torch.ones(3, requires_grad=True)
            with autograd.context() as context_id:
                loss = rpc.rpc_sync("worker1", served_forward, args=(x,))
                with outcome_of(act):
                    autograd.backward(context_id, [loss])
                check(context_id, (name, act))


def steps_of_every_way() -> None:
    rpc.rpc_sync("worker1", run_all_on_the_loop)
    served_weight = rpc.rpc_sync("worker1", weight_reference)
    optimizer = DistributedOptimizer(make_sgd, [served_weight])
    rpc.rpc_sync("worker1", begin_way, args=("parameter_hook",))
    for name in STEPS:
        for act in ("none", *ACTS):
            with autograd.context() as context_id:
                x = torch.ones(3)
                loss = rpc.rpc_sync("worker1", weighed, args=(x,))
                autograd.backward(context_id, [loss])
                if act == "none":  # without callbacks, maybe on the loop
                    optimizer.step(context_id)
                    rpc.rpc_sync("worker1", begin_step, args=(name,))
                    continue
                rpc.rpc_sync("worker1", begin_act, args=(act,))
                with outcome_of(act):
                    optimizer.step(context_id)
                check(context_id, (name, act))


def test_callbacks_of_a_pass_may_wait() -> None:
    play(passes_of_every_way)


def test_callbacks_of_a_step_may_wait() -> None:
    play(steps_of_every_way)


# --- first calls through a reference -------------------------------------------------


def make_layer() -> nn.Linear:
    return nn.Linear(3, 1)


def gradients_here(context_id: int) -> int:
    return len(autograd.get_gradients(context_id))


def result_of(started: Any) -> Any:
    if isinstance(started, rpc.RRef):
        return started.to_here()
    return started.wait() if isinstance(started, torch._C.Future) else started  # noqa: SLF001


def passes_through_new_references() -> None:
    """The caller knows the methods of a class; for a function's value it asks."""
    makers: list[tuple[Any, tuple[int, ...]]] = [(nn.Linear, (3, 1)), (make_layer, ())]
    for make, arguments in makers:
        for api in ("rpc_sync", "rpc_async", "remote"):
            layer = rpc.remote("worker1", make, args=arguments)
            with autograd.context() as context_id:
                output = result_of(getattr(layer, api)().forward(torch.ones(2, 3)))
                autograd.backward(context_id, [output.sum()])
                count = rpc.rpc_sync("worker1", gradients_here, args=(context_id,))
                assert count == 2, (make, api)


def test_the_first_call_through_a_reference_belongs_to_its_context() -> None:
    play(passes_through_new_references)


COUNT = 200
GUEST = "worker1"


def double(number: int) -> int:
    return 2 * number


def wait_for_the_next() -> None:
    """Each callback waits for the future that ends after its own."""
    futures = [rpc.rpc_async(GUEST, double, (number,)) for number in range(COUNT)]
    done = threading.Semaphore(0)

    def wait_after(at: int) -> None:
        def wait(_: torch.futures.Future[int]) -> None:
            futures[at + 1].wait()
            done.release()

        futures[at].add_done_callback(wait)

    for at in range(8):  # torch has 16 threads for them
        wait_after(at)
    assert torch.futures.wait_all(futures) == [2 * number for number in range(COUNT)]
    for _ in range(8):
        assert done.acquire(timeout=60.0)


def test_a_callback_may_wait_for_a_future_that_ends_after_its_own() -> None:
    play(wait_for_the_next)


def call_on() -> None:
    """Each callback makes a call, and waits for it."""
    futures = [
        rpc.rpc_async(GUEST, double, (number,)).then(
            lambda done: rpc.rpc_sync(GUEST, double, (done.value(),))
        )
        for number in range(COUNT)
    ]
    assert torch.futures.wait_all(futures) == [4 * number for number in range(COUNT)]


def test_callbacks_may_make_calls() -> None:
    play(call_on)
