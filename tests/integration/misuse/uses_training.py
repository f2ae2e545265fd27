"""How training is used: collectives, autograd, optimizers, remote modules."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, Protocol

import torch

import asyncrpc
from asyncrpc import Group, autograd, nn
from asyncrpc.errors import NoGradientPathError, OptimizerError
from asyncrpc.optim import DistributedOptimizer
from asyncrpc.testing import acting_as
from tests.integration.misuse.beside import in_thread
from tests.integration.misuse.traffic import make_parameter
from tests.integration.misuse.uses_values import COUNT, FLAG, SAID, VALUES
from tests.integration.misuse.using import Arguments, Use, nothing
from tests.integration.misuse.wrong import SECONDS, World

TENSORS: Final = {"a tensor", "a tensor of integers"}
NAMES: Final = {"text", "empty text", "text with a surrogate", "too large"}
POSITIVE: Final = {"an integer", "a fraction", "infinite", "an integer of 70 bits"}
REFUSED_BY_OWNER: Final = (
    asyncrpc.UsageError,
    asyncrpc.errors.EncodeError,
    OptimizerError,
)


def three(_: object = None) -> torch.Tensor:
    return torch.ones(3)


def kept(world: World, what: str, make: Callable[[], Any]) -> Any:
    """Return what all uses of this world share; made when it is asked for first."""
    if what not in world.kept:
        with acting_as(world.a):
            world.kept[what] = make()
    return world.kept[what]


# --- collectives ---------------------------------------------------------------------


def groups(world: World, name: str = "misuse") -> tuple[Group, Group]:
    """Return a group of `a` and `b`, at both."""

    def make() -> tuple[Group, Group]:
        workers = world.a, world.other
        a, b = (Group(worker, ["a", "b"], name=name) for worker in workers)
        return a, b

    pair: tuple[Group, Group] = kept(world, f"group {name}", make)
    return pair


def _own_groups(world: World, method: str) -> tuple[Group, Group]:
    """Return a group for one collective: what fails in it is nobody else's."""
    return groups(world, f"misuse of {method}")


def _of_group(
    method: str, right: Arguments, fits: Mapping[str, set[str]], **there: Any
) -> Use:
    """Return how a collective is used.

    Args:
        method: of the group.
        right: arguments here.
        fits: see `Use`.
        there: those at the other rank that differ.
    """

    async def rightly(world: World) -> None:
        here, other = _own_groups(world, method)
        arguments = {name: make(world) for name, make in right.items()}
        await asyncio.gather(
            getattr(here, method)(**arguments),
            getattr(other, method)(**arguments | there),
        )

    return Use(
        lambda world: getattr(_own_groups(world, method)[0], method),
        right=right,
        fits=fits,
        rightly=rightly,
    )


ROOT: Final = {"root": lambda _: 0}
TENSOR: Final = {"tensor": three}
EACH: Final = {"tensors": lambda _: [torch.ones(3), torch.ones(3)]}


async def _empty(world: World) -> None:
    await asyncio.gather(
        *(own_group.empty(3) for own_group in _own_groups(world, "empty"))
    )


async def _send(world: World) -> None:
    here, other = groups(world)
    await asyncio.gather(here.send(three(), 1), other.recv(0))


async def _recv(world: World) -> None:
    here, other = groups(world)
    await asyncio.gather(here.recv(1), other.send(three(), 0))


async def _refuse(world: World) -> None:
    serial = world.kept["refused"] = world.kept.get("refused", 0) + 1
    here, other = groups(world, f"refused {serial}")
    here.refuse("had no time")
    try:
        await other.barrier()
    except asyncrpc.errors.CollectiveError:
        return
    finally:
        here.close()
        other.close()
    raise AssertionError("the others were not told")


async def closed(group: Any) -> None:
    group.close()


SOON_S: Final = 0.2  # for a group that nobody else comes to
_OF_ELASTIC: Final = (asyncrpc.UsageError, asyncrpc.errors.CollectiveError)


async def _elastic(world: World) -> None:
    """Let `a` be in an elastic group, alone."""
    if "elastic" in world.kept:
        world.kept["elastic"].close()
    join = asyncrpc.join_group
    world.kept["elastic"] = await join(world.a, "elastic", timeout_s=60.0)


async def _joined(joining: Any) -> None:
    (await joining).close()


COLLECTIVES: Final[Mapping[str, Use]] = {
    "Group": Use(
        lambda _: Group,
        right={
            "worker": lambda world: world.a,
            "members": lambda _: ["a", "b"],
            "name": lambda _: "new",
        },
        fits={"members": {"none"}, "name": NAMES, "timeout_s": SECONDS | {"infinite"}},
        says={"members": r"\bmembers\b|worker .* is unknown"},
        finish=closed,
    ),
    "Group.subgroup": Use(
        lambda world: groups(world)[0].subgroup,
        right={"ranks": lambda _: [0, 1]},
        fits={"name": NAMES},
        finish=closed,
    ),
    "Group.duplicate": Use(
        lambda world: groups(world)[0].duplicate, fits={"name": NAMES}, finish=closed
    ),
    "Group.refuse": Use(
        lambda world: _own_groups(world, "refuse")[0].refuse,
        right={"reason": lambda _: "has no time"},
        fits={"reason": NAMES},
        rightly=_refuse,
    ),
    "Group.close": Use(
        lambda world: groups(world, "closed")[0].close, needs_worker=False
    ),
    "Group.__aenter__": Use(lambda world: groups(world)[0].__aenter__),
    "Group.empty": Use(
        lambda world: _own_groups(world, "empty")[0].empty,
        right={"shape": lambda _: (3,)},
        fits={"shape": {"an integer", "an empty list"}},
        rightly=_empty,
    ),
    "ElasticGroup.reconfigure": Use(
        lambda world: world.kept["elastic"].reconfigure,
        right={"timeout_s": lambda _: SOON_S},
        fits={
            "step": {"an integer"},
            "min_size": {"an integer"},
            "timeout_s": SECONDS | {"infinite"},
        },
        refusals=_OF_ELASTIC,
        ready=_elastic,
    ),
    "ElasticGroup.close": Use(
        lambda world: world.kept["elastic"].close, ready=_elastic, needs_worker=False
    ),
    "ElasticGroup.__aenter__": Use(
        lambda world: world.kept["elastic"].__aenter__, ready=_elastic
    ),
    "join_group": Use(
        lambda _: asyncrpc.join_group,
        right={
            "worker": lambda world: world.a,
            "name": lambda _: "joined",
            "timeout_s": lambda _: SOON_S,
        },
        fits={
            "worker": {"another worker"},
            "name": {"text", "text with a surrogate"},
            "step": {"an integer", "a negative integer"},
            "min_size": {"an integer"},
            "timeout_s": SECONDS | {"infinite"},
        },
        refusals=_OF_ELASTIC,
        finish=_joined,
    ),
    "Group.barrier": _of_group("barrier", {}, {}),
    "Group.all_reduce": _of_group("all_reduce", TENSOR, {"tensor": TENSORS}),
    "Group.reduce": _of_group("reduce", TENSOR | ROOT, {"tensor": TENSORS}),
    "Group.broadcast": _of_group("broadcast", TENSOR | ROOT, {"tensor": TENSORS}),
    "Group.all_gather": _of_group("all_gather", TENSOR, {"tensor": TENSORS}),
    "Group.gather": _of_group("gather", TENSOR | ROOT, {"tensor": TENSORS}),
    "Group.scatter": _of_group(
        "scatter", EACH | ROOT, {"device": {"none"}}, tensors=None
    ),
    "Group.reduce_scatter": _of_group(
        "reduce_scatter", EACH, {"tensors": {"a tensor"}}
    ),
    "Group.all_to_all": _of_group("all_to_all", EACH, {"tensors": {"a tensor"}}),
    "Group.send": Use(
        lambda world: groups(world)[0].send,
        right=TENSOR | {"to": lambda _: 1},
        fits={"tensor": TENSORS, "tag": {"an integer", "a negative integer"}},
        rightly=_send,
    ),
    "Group.recv": Use(
        lambda world: groups(world)[0].recv,
        fits={
            "from_": {"none"},
            "tag": {"an integer", "a negative integer"},
            "out": TENSORS | {"none"},
        },
        rightly=_recv,
    ),
}

# Those that send nothing, or wait for nobody.
AT_ONCE: Final = {
    "Group",
    "Group.subgroup",
    "Group.duplicate",
    "Group.refuse",
    "Group.close",
    "Group.__aenter__",
}

# --- autograd, optimizers ------------------------------------------------------------

HERE: Final = object()  # stands for the context that a use is in


def in_context(function: Callable[..., Awaitable[Any]]) -> Callable[..., Any]:
    """Return a function that runs in an autograd context of its own."""

    @functools.wraps(function)
    async def within(*args: Any, **kwargs: Any) -> Any:
        async with autograd.context() as context:
            arguments = [context if arg is HERE else arg for arg in args]
            return await function(*arguments, **kwargs)

    return within


def root(_: object = None) -> torch.Tensor:
    return torch.ones(2, requires_grad=True).sum()


async def _gradients(context: Any) -> Any:
    return autograd.get_gradients(context)


async def _current(_: World) -> None:
    async with autograd.context() as context:
        assert autograd.current_context() is context


def remote_parameter(world: World) -> asyncrpc.RRef[torch.nn.Parameter]:
    rref: asyncrpc.RRef[torch.nn.Parameter] = world.peer.remote(make_parameter)
    return rref


def optimizer(world: World) -> DistributedOptimizer:
    stepping: DistributedOptimizer = kept(
        world,
        "optimizer",
        lambda: DistributedOptimizer("SGD", [remote_parameter(world)], lr=0.1),
    )
    return stepping


async def _state(world: World) -> None:
    """Keep the state of an optimizer."""
    if "state" not in world.kept:
        world.kept["state"] = await optimizer(world).state_dict()


AUTOGRAD: Final[Mapping[str, Use]] = {
    "autograd.context": Use(lambda _: autograd.context),
    "autograd.Context.__aenter__": Use(lambda _: autograd.context, rightly=_current),
    "autograd.current_context": Use(
        lambda _: autograd.current_context, rightly=_current, needs_worker=False
    ),
    "autograd.backward": Use(
        lambda _: in_context(autograd.backward),
        right={"context": lambda _: HERE, "roots": lambda _: [root()]},
        fits={
            "retain_graph": FLAG,
            "create_graph": FLAG,
            "gradients": {"none"},
            "timeout_s": SECONDS | {"infinite"},
        },
        refusals=(asyncrpc.UsageError, NoGradientPathError),
    ),
    "autograd.get_gradients": Use(
        lambda _: in_context(_gradients), right={"context": lambda _: HERE}
    ),
    "optim.DistributedOptimizer": Use(
        lambda _: DistributedOptimizer,
        right={
            "optimizer_class": lambda _: "SGD",
            "params_rref": lambda world: [remote_parameter(world)],
            "kwargs": lambda _: {"lr": 0.1},
        },
        fits={"optimizer_class": {"a function", "a local function"}},
        says={"args": "could not be made", "kwargs": r"'wrong'|\bkwargs\b"},
        refusals=REFUSED_BY_OWNER,
        is_found_there=True,
    ),
    "optim.DistributedOptimizer.step": Use(
        lambda world: in_context(optimizer(world).step),
        right={"context": lambda _: HERE},
        fits={
            "clip_grad_norm": POSITIVE | {"none"},
            "closure": {"none"},
            "skip_nonfinite": FLAG,
            "allow_stale": FLAG,
        },
    ),
    "optim.DistributedOptimizer.backward_and_step": Use(
        lambda world: in_context(optimizer(world).backward_and_step),
        right={"context": lambda _: HERE, "roots": lambda _: [root()]},
        fits={
            "gradients": {"none"},
            "timeout_s": SECONDS | {"infinite"},
            "retain_graph": FLAG,
            "clip_grad_norm": POSITIVE | {"none"},
            "skip_nonfinite": FLAG,
            "allow_stale": FLAG,
        },
        refusals=(asyncrpc.UsageError, NoGradientPathError),
    ),
    "optim.DistributedOptimizer.add_param_group": Use(
        lambda world: optimizer(world).add_param_group,
        right={"group": lambda world: {"params": [remote_parameter(world)]}},
        is_found_there=True,
    ),
    "optim.DistributedOptimizer.state_dict": Use(
        lambda world: optimizer(world).state_dict, fits={"per_owner": FLAG}
    ),
    "optim.DistributedOptimizer.load_state_dict": Use(
        lambda world: optimizer(world).load_state_dict,
        ready=_state,
        right={"state_dict": lambda world: world.kept["state"]},
    ),
}

# --- modules -------------------------------------------------------------------------


class Encoder(torch.nn.Module):
    """A module with a method of its own."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = self.inner(x)
        return scaled

    def count(self, *args: Any, **kwargs: Any) -> int:
        return len(args) + len(kwargs)


class Counts(Protocol):
    """An interface: what is declared here is awaited."""

    async def count(self, *args: Any, **kwargs: Any) -> int: ...


def module(world: World) -> nn.RemoteModule:
    remote_module: nn.RemoteModule = kept(
        world, "module", lambda: nn.RemoteModule("b", Encoder, (3,))
    )
    return remote_module


def _of_module(method: str, **about: Any) -> Use:
    return Use(lambda world: getattr(module(world), method), **about)


def _in_thread(method: str) -> Use:
    """Return how a method is used that waits for its result."""

    def make(world: World) -> Callable[..., Any]:
        return in_thread(getattr(module(world), method))

    return Use(make, right={"args": lambda _: [torch.ones(2, 3)]}, **GIVEN)


def pipeline(world: World) -> nn.Pipeline:
    pipe: nn.Pipeline = kept(
        world, "pipeline", lambda: nn.Pipeline([module(world)], chunks=2)
    )
    return pipe


def _of_pipeline(method: str, **about: Any) -> Use:
    return Use(lambda world: getattr(pipeline(world), method), **about)


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def rows(_: object = None) -> torch.Tensor:
    return torch.ones(4, 3)


def report(_: World) -> nn.PipelineReport:
    span = nn.ActionSpan(nn.StageAction(nn.ActionKind.FORWARD, 0), 0.0, 1.0)
    return nn.PipelineReport("1f1b", 1, [nn.StageReport("b", [span], 1)])


async def _of_all_parameters(world: World) -> None:
    optimizer(world)  # which mistakes are made with
    pipe = pipeline(world)
    stepping = DistributedOptimizer("SGD", await pipe.remote_parameters(), lr=0.1)
    await pipe.train_step(rows(), rows(), loss, stepping)


GIVEN: Final[Mapping[str, Any]] = {
    "fits": {"args": VALUES, "kwargs": VALUES},
    "says": SAID,
}
TRAINED: Final[Arguments] = {"x": rows, "target": rows, "loss_fn": lambda _: loss}
TRAINED_FITS: Final = {
    "x": TENSORS,
    "target": TENSORS,
    "loss_fn": {"a function", "a class", "a local function"},
    "clip_grad_norm": POSITIVE | {"none"},
}

MODULES: Final[Mapping[str, Use]] = {
    "nn.RemoteModule": Use(
        lambda _: nn.RemoteModule,
        right={
            "remote_device": lambda _: "b",
            "module_cls": lambda _: Encoder,
            "args": lambda _: [3],
        },
        fits={
            "module_cls": {"a function", "a local function"},
            "args": {"none", "an empty list", "a list of numbers", "a list of text"},
            "kwargs": {"none", "a map"},
        },
    ),
    "nn.RemoteModule.init_from_module_rref": Use(
        lambda _: nn.RemoteModule.init_from_module_rref,
        right={
            "remote_device": lambda _: "b",
            "module_rref": lambda world: module(world).module_rref,
        },
    ),
    "nn.RemoteModule.forward_async": _of_module(
        "forward_async", right={"args": lambda _: [torch.ones(2, 3)]}, **GIVEN
    ),
    "nn.RemoteModule.forward": _in_thread("forward"),
    "nn.RemoteModule.__call__": _in_thread("__call__"),
    "nn.RemoteModule.typed": _of_module("typed", right={"interface": lambda _: Counts}),
    "nn.RemoteModule.run_method": _of_module(
        "run_method",
        right={"name": lambda _: "count"},
        fits={
            "name": {"text"},
            "args": {"an empty list", "a list of numbers", "a list of text"},
            "kwargs": {"none", "a map"},
        },
    ),
    "nn.RemoteModule.get_module_rref": _of_module(
        "get_module_rref", finish=nothing, needs_worker=False
    ),
    "nn.RemoteModule.remote_parameters": _of_module(
        "remote_parameters", fits={"recurse": FLAG}
    ),
    "nn.RemoteModule.named_remote_parameters": _of_module(
        "named_remote_parameters", fits={"recurse": FLAG}
    ),
    "nn.RemoteModule.to": _of_module("to", right={"dtype": lambda _: torch.float32}),
    "nn.RemoteModule.train": _of_module("train", fits={"mode": FLAG}),
    "nn.RemoteModule.eval": _of_module("eval"),
    "nn.RemoteModule.state_dict": _of_module("state_dict"),
    "nn.RemoteModule.load_state_dict": _of_module(
        "load_state_dict",
        right={"state_dict": lambda _: Encoder(3).state_dict()},
        fits={"state_dict": {"a map"}, "strict": FLAG},
    ),
    "nn.Pipeline": Use(
        lambda _: nn.Pipeline,
        right={"stages": lambda world: [module(world)], "chunks": lambda _: 2},
        fits={"chunks": COUNT},
    ),
    "nn.Pipeline.remote_parameters": _of_pipeline("remote_parameters"),
    "nn.Pipeline.train": _of_pipeline("train", fits={"mode": FLAG}),
    "nn.Pipeline.eval": _of_pipeline("eval"),
    "nn.Pipeline.forward": _of_pipeline(
        "forward", right={"x": rows}, fits={"x": TENSORS}
    ),
    "nn.Pipeline.forward_backward": Use(
        lambda world: in_context(pipeline(world).forward_backward),
        right=TRAINED,
        fits={name: TRAINED_FITS[name] for name in TRAINED},
        is_found_there=True,
    ),
    "nn.Pipeline.train_step": _of_pipeline(
        "train_step",
        right={**TRAINED, "optimizer": optimizer},
        fits=TRAINED_FITS,
        rightly=_of_all_parameters,
        is_found_there=True,
    ),
    "nn.PipelineReport.timeline": Use(
        lambda world: report(world).timeline,
        needs_worker=False,
        fits={"columns": {"an integer"}},
    ),
}

USES: Final[Mapping[str, Use]] = {**COLLECTIVES, **AUTOGRAD, **MODULES}
