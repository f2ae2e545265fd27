"""How data parallel training is used, in a group of one rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

from asyncrpc import Group, ddp
from tests.integration.misuse.uses_training import POSITIVE, closed, kept, three
from tests.integration.misuse.uses_values import CALLABLES, COUNT, FLAG
from tests.integration.misuse.using import ANYTHING, Use
from tests.integration.misuse.wrong import World

CALLED: Final = CALLABLES | {"a local function", "raises in everything"}


def group(world: World) -> Group:
    alone: Group = kept(world, "alone", lambda: Group(world.a, ["a"], name="alone"))
    return alone


def parameter(_: object = None) -> torch.nn.Parameter:
    tensor = torch.nn.Parameter(three())
    tensor.grad = three()
    return tensor


async def model(world: World) -> ddp.DistributedDataParallel:
    """Return a model that is ready."""
    if "model" not in world.kept:
        wrapped = ddp.DistributedDataParallel(torch.nn.Linear(3, 1), group(world))
        world.kept["model"] = await wrapped
    module: ddp.DistributedDataParallel = world.kept["model"]
    return module


def loss_of_model(world: World) -> torch.Tensor:
    loss: torch.Tensor = world.kept["model"](three()).sum()
    return loss


def bucket(_: object = None) -> ddp.GradBucket:
    return ddp.GradBucket(0, three(), [parameter()], is_last=True)


def power(world: World) -> ddp.PowerSGDState:
    state: ddp.PowerSGDState = kept(
        world,
        "power",
        lambda: ddp.PowerSGDState(group(world), start_powerSGD_iter=1 << 20),
    )
    return state


def local(world: World) -> ddp.PostLocalSGDState:
    state: ddp.PostLocalSGDState = kept(
        world, "local", lambda: ddp.PostLocalSGDState(group(world), None, 1)
    )
    return state


def periodic(world: World) -> ddp.PeriodicModelAverager:
    averager: ddp.PeriodicModelAverager = kept(
        world, "periodic", lambda: ddp.PeriodicModelAverager(group(world), 2)
    )
    return averager


def hierarchical(world: World) -> ddp.HierarchicalModelAverager:
    averager: ddp.HierarchicalModelAverager = kept(
        world,
        "hierarchical",
        lambda: ddp.HierarchicalModelAverager(group(world), {2: 1}),
    )
    return averager


def sgd(_: object = None) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter()], lr=0.1)


def post_local(world: World) -> ddp.PostLocalSGDOptimizer:
    optimizer: ddp.PostLocalSGDOptimizer = kept(
        world, "post local", lambda: ddp.PostLocalSGDOptimizer(sgd(), periodic(world))
    )
    return optimizer


def zero(world: World) -> ddp.ZeroRedundancyOptimizer:
    optimizer: ddp.ZeroRedundancyOptimizer = kept(
        world,
        "zero",
        lambda: ddp.ZeroRedundancyOptimizer(
            [parameter()], torch.optim.SGD, group(world), lr=0.1
        ),
    )
    return optimizer


def _ready(method: str, **about: Any) -> Use:
    """Return how a method of a module is used that has been awaited."""

    def make(world: World) -> Any:
        return getattr(world.kept["model"], method)

    return Use(make, ready=model, **about)


def _hook(hook: Any, state: Any, *, needs_worker: bool = True, **fits: Any) -> Use:
    first = "_state" if hook is ddp.noop_hook else "state"
    return Use(
        lambda _: hook,
        needs_worker=needs_worker,
        right={first: state, "bucket": bucket},
        fits={first: set()} | fits,
    )


def _of_bucket(method: str) -> Use:
    return Use(lambda _: getattr(bucket(), method), needs_worker=False)


def _wrapper(wrap: Any) -> Use:
    return Use(
        lambda _: wrap,
        needs_worker=False,
        right={"hook": lambda _: ddp.allreduce_hook},
        fits={"hook": CALLED},
    )


def _saved(of: Any) -> Mapping[str, Use]:
    """Return how the state of a hook's state is saved, by method."""
    return {
        "state_dict": Use(lambda world: of(world).state_dict, needs_worker=False),
        "load_state_dict": Use(
            lambda world: of(world).load_state_dict,
            needs_worker=False,
            right={"state": lambda world: of(world).state_dict()},
        ),
        "maybe_increase_iter": Use(
            lambda world: of(world).maybe_increase_iter,
            needs_worker=False,
            right={"bucket": bucket},
        ),
    }


async def _register(world: World) -> None:
    distributed_data_parallel = ddp.DistributedDataParallel(
        torch.nn.Linear(3, 1), group(world)
    )
    distributed_data_parallel.register_comm_hook(None, ddp.allreduce_hook)
    distributed_data_parallel.close()


async def _join(world: World) -> None:
    async with (await model(world)).join():
        pass


async def _consolidated(world: World) -> None:
    await zero(world).consolidate_state_dict(0)


def _averages(of: Any) -> Use:
    return Use(
        lambda world: of(world).average_parameters,
        right={"params": lambda _: [parameter()]},
        fits={"params": {"an empty list"}},
    )


def _added(of: Any) -> Use:
    return Use(
        lambda world: of(world).add_param_group,
        needs_worker=False,
        right={"param_group": lambda _: {"params": [parameter()]}},
    )


MODELS: Final[Mapping[str, Use]] = {
    "ddp.broadcast_state": Use(
        lambda _: ddp.broadcast_state,
        right={"group": group, "state": three, "source": lambda _: 0},
        fits={"state": ANYTHING},
    ),
    "ddp.DistributedDataParallel.regroup": _ready("regroup", right={"group": group}),
    "ddp.DistributedDataParallel": Use(
        lambda _: ddp.DistributedDataParallel,
        right={"module": lambda _: torch.nn.Linear(3, 1), "group": group},
        fits={
            "broadcast_buffers": FLAG,
            "init_sync": FLAG,
            "bucket_cap_mb": POSITIVE,
            "first_bucket_cap_mb": POSITIVE,
            "find_unused_parameters": FLAG,
            "gradient_as_bucket_view": FLAG,
            "static_graph": FLAG,
            "ignored": {"an empty list"},
        },
        finish=closed,
    ),
    "ddp.DistributedDataParallel.forward": _ready(
        "forward",
        needs_worker=False,
        right={"args": lambda _: [three()]},
        fits={"args": ANYTHING, "kwargs": ANYTHING},
    ),
    "ddp.DistributedDataParallel.backward": _ready(
        "backward",
        right={"loss": loss_of_model},
        fits={"loss": CALLED, "gradient": {"none"}, "retain_graph": FLAG},
    ),
    "ddp.DistributedDataParallel.no_sync": _ready("no_sync", needs_worker=False),
    "ddp.DistributedDataParallel.join": Use(
        lambda world: world.kept["model"].join,
        fits={"divide_by_initial_world_size": FLAG, "throw_on_early_termination": FLAG},
        needs_worker=False,
        ready=model,
        rightly=_join,
    ),
    "ddp.Join": Use(
        lambda _: ddp.Join,
        right={"joinables": lambda world: [world.kept["model"]]},
        fits={"divide_by_initial_world_size": FLAG, "throw_on_early_termination": FLAG},
        needs_worker=False,
        ready=model,
    ),
    "ddp.Join.__aenter__": Use(
        lambda world: world.kept["model"].join, ready=model, rightly=_join
    ),
    "ddp.DistributedDataParallel.register_comm_hook": Use(
        lambda world: (
            ddp.DistributedDataParallel(
                torch.nn.Linear(3, 1), group(world)
            ).register_comm_hook
        ),
        right={"state": lambda _: None, "hook": lambda _: ddp.allreduce_hook},
        fits={"state": ANYTHING, "hook": CALLED},
        needs_worker=False,
        rightly=_register,
    ),
    "ddp.DistributedDataParallel.statistics": _ready("statistics", needs_worker=False),
    "ddp.DistributedDataParallel.close": Use(
        lambda world: (
            ddp.DistributedDataParallel(torch.nn.Linear(3, 1), group(world)).close
        ),
        needs_worker=False,
    ),
    **{
        f"ddp.GradBucket.{name}": _of_bucket(name)
        for name in ("index", "buffer", "gradients", "parameters", "is_last")
    },
    "ddp.GradBucket.set_buffer": Use(
        lambda _: bucket().set_buffer,
        needs_worker=False,
        right={"buffer": three},
        fits={"buffer": {"a tensor of integers"}},
    ),
}

GROUP: Final = {"none"}

STATES: Final[Mapping[str, Use]] = {
    "ddp.HookState": Use(
        lambda _: ddp.HookState,
        needs_worker=False,
        right={"process_group": group},
        fits={"process_group": GROUP},
    ),
    "ddp.PostLocalSGDState": Use(
        lambda _: ddp.PostLocalSGDState,
        needs_worker=False,
        right={
            "process_group": group,
            "subgroup": group,
            "start_localSGD_iter": lambda _: 1,
        },
        fits={
            "process_group": GROUP,
            "subgroup": GROUP,
            "start_localSGD_iter": COUNT,
            "post_local_gradient_allreduce": FLAG,
        },
    ),
    "ddp.PostLocalSGDState.local_group": Use(lambda world: local(world).local_group),
    **{f"ddp.PostLocalSGDState.{name}": use for name, use in _saved(local).items()},
    "ddp.PowerSGDState": Use(
        lambda _: ddp.PowerSGDState,
        needs_worker=False,
        right={"process_group": group},
        fits={
            "process_group": GROUP,
            "matrix_approximation_rank": COUNT,
            "start_powerSGD_iter": COUNT,
            "min_compression_rate": POSITIVE,
            "use_error_feedback": FLAG,
            "warm_start": FLAG,
            "orthogonalization_epsilon": POSITIVE - {"infinite"},
            "random_seed": {"an integer"},
            "compression_stats_logging_frequency": COUNT,
            "batch_tensors_with_same_shape": FLAG,
        },
    ),
    "ddp.PowerSGDState.compression_stats": Use(
        lambda world: power(world).compression_stats, needs_worker=False
    ),
    "ddp.PowerSGDState.average_errors": Use(lambda world: power(world).average_errors),
    **{f"ddp.PowerSGDState.{name}": use for name, use in _saved(power).items()},
    "ddp.allreduce_hook": _hook(ddp.allreduce_hook, group),
    "ddp.bf16_compress_hook": _hook(ddp.bf16_compress_hook, group),
    "ddp.fp16_compress_hook": _hook(ddp.fp16_compress_hook, group),
    "ddp.noop_hook": _hook(ddp.noop_hook, group, needs_worker=False, _state=ANYTHING),
    "ddp.post_localSGD_hook": _hook(ddp.post_localSGD_hook, local),
    "ddp.powerSGD_hook": _hook(ddp.powerSGD_hook, power),
    "ddp.batched_powerSGD_hook": _hook(ddp.batched_powerSGD_hook, power),
    **{
        f"ddp.{wrap.__name__}": _wrapper(wrap)
        for wrap in (ddp.bf16_compress_wrapper, ddp.fp16_compress_wrapper)
    },
}

OPTIMIZERS: Final[Mapping[str, Use]] = {
    "ddp.PeriodicModelAverager": Use(
        lambda _: ddp.PeriodicModelAverager,
        right={"group": group, "period": lambda _: 2},
        fits={"period": COUNT, "warmup_steps": COUNT},
        finish=closed,
    ),
    "ddp.PeriodicModelAverager.close": Use(
        lambda world: ddp.PeriodicModelAverager(group(world), 2).close,
        needs_worker=False,
    ),
    "ddp.PeriodicModelAverager.average_parameters": _averages(periodic),
    "ddp.HierarchicalModelAverager": Use(
        lambda _: ddp.HierarchicalModelAverager,
        right={"group": group, "period_group_size_dict": lambda _: {2: 1}},
        fits={"warmup_steps": COUNT},
        finish=closed,
    ),
    "ddp.HierarchicalModelAverager.close": Use(
        lambda world: ddp.HierarchicalModelAverager(group(world), {2: 1}).close,
        needs_worker=False,
    ),
    "ddp.HierarchicalModelAverager.average_parameters": _averages(hierarchical),
    "ddp.PostLocalSGDOptimizer": Use(
        lambda _: ddp.PostLocalSGDOptimizer,
        needs_worker=False,
        right={"optim": sgd, "averager": periodic},
    ),
    "ddp.PostLocalSGDOptimizer.step": Use(
        lambda world: post_local(world).step, fits={"closure": CALLED | {"none"}}
    ),
    "ddp.PostLocalSGDOptimizer.zero_grad": Use(
        lambda world: post_local(world).zero_grad,
        needs_worker=False,
        fits={"set_to_none": FLAG},
    ),
    "ddp.PostLocalSGDOptimizer.add_param_group": _added(post_local),
    "ddp.PostLocalSGDOptimizer.state_dict": Use(
        lambda world: post_local(world).state_dict, needs_worker=False
    ),
    "ddp.PostLocalSGDOptimizer.load_state_dict": Use(
        lambda world: post_local(world).load_state_dict,
        needs_worker=False,
        right={"state_dict": lambda world: post_local(world).state_dict()},
    ),
    "ddp.ZeroRedundancyOptimizer": Use(
        lambda _: ddp.ZeroRedundancyOptimizer,
        right={
            "params": lambda _: [parameter()],
            "optimizer_class": lambda _: torch.optim.SGD,
            "group": group,
            "defaults": lambda _: {"lr": 0.1},
        },
        fits={"parameters_as_bucket_view": FLAG},
        says={"defaults": "'wrong'"},
        finish=closed,
    ),
    "ddp.ZeroRedundancyOptimizer.step": Use(
        lambda world: zero(world).step, fits={"closure": CALLED | {"none"}}
    ),
    "ddp.ZeroRedundancyOptimizer.synchronize": Use(
        lambda world: zero(world).synchronize
    ),
    "ddp.ZeroRedundancyOptimizer.add_param_group": _added(zero),
    "ddp.ZeroRedundancyOptimizer.consolidate_state_dict": Use(
        lambda world: zero(world).consolidate_state_dict
    ),
    "ddp.ZeroRedundancyOptimizer.state_dict": Use(
        lambda world: zero(world).state_dict, ready=_consolidated, needs_worker=False
    ),
    "ddp.ZeroRedundancyOptimizer.load_state_dict": Use(
        lambda world: zero(world).load_state_dict,
        ready=_consolidated,
        needs_worker=False,
        right={"state_dict": lambda world: zero(world).state_dict()},
    ),
    "ddp.ZeroRedundancyOptimizer.close": Use(
        lambda world: (
            ddp.ZeroRedundancyOptimizer(
                [parameter()], torch.optim.SGD, group(world), lr=0.1
            ).close
        ),
        needs_worker=False,
    ),
}

USES: Final[Mapping[str, Use]] = {**MODELS, **STATES, **OPTIMIZERS}
