"""An optimizer that raises wherever it is told to, and what it optimizes.

The functions of this module run at the owners of parameters.
"""

from __future__ import annotations

from typing import Any, Final

import torch

import asyncrpc
from asyncrpc import RRef
from tests.integration.core.misbehaving import give

_plans: Final[dict[int, tuple[str, str]]] = {}  # by worker: where, and what


@asyncrpc.on_loop
def go_wrong(where: str = "", kind: str = "") -> None:
    """Have the optimizers of this worker raise; without a place, no more."""
    _plans.pop(asyncrpc.current_worker().incarnation, None)
    if where:
        _plans[asyncrpc.current_worker().incarnation] = where, kind


class Wrong(torch.optim.SGD):
    """Raises, or gives what it should not, where it is told to."""

    def __init__(self, parameters: Any, **options: Any) -> None:
        # Where it is, only its constructor can ask.
        self.__dict__["home"] = int(asyncrpc.current_worker().incarnation)
        self._come("constructor")
        super().__init__(parameters, **options)
        self._come("constructor's end")

    def _come(self, where: str) -> Any:
        there, kind = _plans.get(self.__dict__["home"], ("", ""))
        return give(kind) if there == where else None

    def step(self, closure: Any = None) -> Any:
        self._come("step")
        super().step(closure)
        if _plans.get(self.__dict__["home"], ("",))[0] == "group":
            extra = torch.nn.Parameter(torch.ones(1))
            self.add_param_group({"params": [extra], "lr": 1.0})
            self._come("group")
        self._come("step's end")
        self.zero_grad()

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        super().zero_grad(*args, **kwargs)
        self._come("zero_grad")

    def state_dict(self) -> Any:
        wrong = self._come("state_dict")
        return super().state_dict() if wrong is None else wrong

    def load_state_dict(self, state_dict: Any) -> None:
        self._come("load_state_dict")
        super().load_state_dict(state_dict)


def make() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(3))


async def product(rref: RRef[torch.nn.Parameter], x: torch.Tensor) -> torch.Tensor:
    """Return a scalar of which the gradient for the parameter is `x`."""
    return (await rref * x).sum()


async def value(rref: RRef[torch.nn.Parameter]) -> torch.Tensor:
    return (await rref).detach().clone()
