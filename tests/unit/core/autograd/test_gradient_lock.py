"""A thread that waits for a call gives the lock up, and finds its `.grad` again."""

from __future__ import annotations

import threading

import torch

from asyncrpc.core.autograd.gradient_lock import GradientLock, GradientsSetAside


def grad_of(parameter: torch.Tensor) -> float | None:
    return None if parameter.grad is None else parameter.grad.item()


def test_waiting_thread_sets_its_gradients_aside_for_other_threads() -> None:
    lock, parameter = GradientLock(), torch.ones((), requires_grad=True)
    parameter.grad = torch.tensor(1.0)
    seen: list[float | None] = []

    def other() -> None:
        with lock, GradientsSetAside(lock, [parameter], [torch.tensor(7.0)]):
            seen.append(grad_of(parameter))
        seen.append(grad_of(parameter))
        parameter.grad = torch.tensor(3.0)

    with lock, lock, GradientsSetAside(lock, [parameter], [torch.tensor(5.0)]):
        assert lock.is_held_here
        token = lock.give_up()
        assert not lock.is_held_here
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        lock.take_back(token)
        assert lock.is_held_here
        assert grad_of(parameter) == 5.0
    assert not lock.is_held_here
    assert seen == [7.0, 1.0]
    assert grad_of(parameter) == 3.0


def test_failed_change_leaves_gradients_alone() -> None:
    lock = GradientLock()
    first, second = torch.ones(1, requires_grad=True), torch.ones(2, requires_grad=True)
    with lock:
        try:
            with GradientsSetAside(lock, [first, second], [torch.ones(1)] * 2):
                raise AssertionError("a gradient of another shape was taken")
        except RuntimeError:
            pass
    assert first.grad is None
    assert second.grad is None
    assert lock.changes == []
