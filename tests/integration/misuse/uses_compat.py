"""How torch's names are used: one process plays, and another serves it.

Torch's own exceptions and texts hold here, so any exception is right, if it comes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, cast

import torch
from torch import nn

from asyncrpc.compat import autograd, rpc
from asyncrpc.compat.nn import RemoteModule
from asyncrpc.compat.optim import DistributedOptimizer
from tests.integration.misuse.wrong import OF_WORKERS, WRONG, World

PEER: Final = "worker1"
KINDS: Final[Mapping[str, Callable[[], Any]]] = {
    **{
        kind: partial(make, cast("World", None))
        for kind, make in WRONG.items()
        if kind not in OF_WORKERS  # a program with torch's names sees none
    },
    "a reference": lambda: rpc.RRef(1),
    "a future": torch.futures.Future,
}
ANYTHING: Final = frozenset(KINDS)


@dataclass(frozen=True)
class Use:
    """A function with torch's name, and what it is right to give it.

    Attributes:
        make: returns what is called.
        right: arguments to begin with; a use adds or replaces one.
        wrong: parameters that are given what is wrong, each with the kinds that are
            right for it, or may be.
    """

    make: Callable[[], Callable[..., Any]]
    right: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    wrong: Mapping[str, Collection[str]] = field(default_factory=dict)

    def attempt(self, parameter: str = "", kind: str = "") -> Any:
        """Use it once, rightly or with one argument of a kind."""
        arguments = {name: make() for name, make in self.right.items()}
        if parameter:
            arguments[parameter] = KINDS[kind]()
        return finished(self.make()(**arguments))

    def mistakes(self) -> list[tuple[str, str]]:
        """Return what can be done wrongly: parameters and kinds."""
        return [
            (parameter, kind)
            for parameter, fitting in self.wrong.items()
            for kind in KINDS
            if kind not in fitting
        ]


def finished(result: Any) -> Any:
    """Return what comes of what a use returns."""
    if isinstance(result, torch.futures.Future):
        return result.wait()
    if isinstance(result, rpc.RRef):
        return result.to_here()
    return result


def give_back(*args: Any, **kwargs: Any) -> Any:
    """Be called with anything."""
    return len(args), len(kwargs)


def loss() -> torch.Tensor:
    """Return a root of a backward pass whose graph is here and at the peer."""
    x = torch.ones(3, requires_grad=True)
    doubled: torch.Tensor = rpc.rpc_sync(PEER, torch.mul, (x, 2.0))
    return doubled.sum()


def _backward(**arguments: Any) -> None:
    with autograd.context() as context:
        autograd.backward(**{"context_id": context, "roots": [loss()], **arguments})


def _gradients(**arguments: Any) -> None:
    with autograd.context() as context:
        autograd.get_gradients(**{"context_id": context, **arguments})


def _rref_backward(**arguments: Any) -> None:
    with autograd.context() as context:
        rpc.RRef(loss()).backward(**{"dist_autograd_ctx_id": context, **arguments})


def parameter() -> rpc.RRef[Any]:
    return rpc.remote(PEER, nn.Parameter, (torch.ones(3),))


def _optimizer(optimizer_class: Any, params_rref: Any, **arguments: Any) -> None:
    DistributedOptimizer(optimizer_class, params_rref, **{"lr": 0.1, **arguments})


def _step(**arguments: Any) -> None:
    with autograd.context() as context:
        optimizer = DistributedOptimizer(torch.optim.SGD, [parameter()], lr=0.1)
        autograd.backward(context, [loss()])
        optimizer.step(**{"context_id": context, **arguments})


def _module(**arguments: Any) -> Any:
    return RemoteModule(**arguments).forward(torch.ones(2, 2))


# As torch does, any real number is a timeout: True is 1 s, less than 0 the default.
SECONDS: Final = {
    *("true", "an integer", "a negative integer", "an integer of 70 bits"),
    *("a fraction", "infinite"),
}
FUNCTIONS: Final = {"a class", "a function"}
# As torch does, whatever can be iterated over is arguments.
SEQUENCES: Final = {
    *("none", "an empty list", "a list of numbers", "a list of text"),
    *("text", "empty text", "text with a surrogate", "bytes", "a map", "a generator"),
    *("too many dimensions", "too large", "too deep", "a tensor"),
    *("a tensor of integers", "a meta tensor", "a sparse tensor"),
}
TO: Final = {"to": lambda: PEER, "func": lambda: give_back}
CALL: Final = {
    "to": {"true"},  # a rank
    "func": FUNCTIONS | {"a local function"},
    "args": SEQUENCES,
    "kwargs": {"none", "a map", "empty text", "an empty list"},
    "timeout": SECONDS | {"none"},
}

USES: Final[Mapping[str, Use]] = {
    "rpc.rpc_sync": Use(lambda: rpc.rpc_sync, TO, CALL),
    "rpc.rpc_async": Use(lambda: rpc.rpc_async, TO, CALL),
    "rpc.remote": Use(lambda: rpc.remote, TO, CALL),
    "rpc.get_worker_info": Use(
        lambda: rpc.get_worker_info, wrong={"worker_name": {"none", "true"}}
    ),
    "rpc.backend_registered": Use(
        lambda: rpc.backend_registered, {"backend_name": lambda: "TENSORPIPE"}
    ),
    "rpc.RRef": Use(lambda: rpc.RRef, {"value": lambda: 1}),
    "rpc.RRef.to_here": Use(
        lambda: parameter().to_here, wrong={"timeout": CALL["timeout"]}
    ),
    "rpc.RRef.backward": Use(
        lambda: _rref_backward,
        wrong={
            "dist_autograd_ctx_id": {"an integer"},
            "retain_graph": {"true", "an integer"},
        },
    ),
    "autograd.backward": Use(
        lambda: _backward,
        wrong={"context_id": {"an integer"}, "roots": set(), "retain_graph": ANYTHING},
    ),
    "autograd.get_gradients": Use(
        lambda: _gradients, wrong={"context_id": {"an integer"}}
    ),
    "optim.DistributedOptimizer": Use(
        lambda: _optimizer,
        {
            "optimizer_class": lambda: torch.optim.SGD,
            "params_rref": lambda: [parameter()],
        },
        {
            "optimizer_class": set(),
            "params_rref": {"too large"},
            "lr": SECONDS | {"not a number"},
        },
    ),
    "optim.DistributedOptimizer.step": Use(
        lambda: _step, wrong={"context_id": {"an integer"}}
    ),
    "nn.RemoteModule": Use(
        lambda: _module,
        {
            "remote_device": lambda: PEER,
            "module_cls": lambda: nn.Linear,
            "args": lambda: (2, 2),
        },
        {
            "remote_device": set(),
            "module_cls": set(),
            "args": SEQUENCES,
            "kwargs": CALL["kwargs"],
        },
    ),
}
