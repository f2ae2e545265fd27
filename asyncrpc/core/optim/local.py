"""The part of a distributed optimizer that one owner runs: torch's own, on its values.

A step takes the gradients of one autograd context.  They are in `.grad` only during the
step, and only on the parameters of this optimizer.  A parameter that was not reached in
this context has no gradient, so a gradient of an earlier step is never applied again;
and a `.grad` of the program's own is put back.

A step that may raise keeps a copy of the values that it changes, and puts it back if it
raises.  A copy costs about as much as a plain SGD step, so it is made only until it is
known that the step cannot raise.  torch's own optimizers refuse parameters and
gradients of kinds that they do not support, such as sparse ones: a parameter that was
stepped with a gradient of the same layout will be stepped again.  The user's own
optimizers may do anything: their parameters are copied at every step.

torch wraps `step` of every class of optimizers in a range for profilers, and in the
calls of hooks.  Without either, the wrapper is half of a small SGD step: 6 of 12 us.
So where no user code can be called, a step is made without it.
"""

from __future__ import annotations

import copy
import math
from collections import OrderedDict, defaultdict
from collections.abc import (
    Callable,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from contextlib import contextmanager
from types import FunctionType
from typing import Any, Final, TypeAlias

import torch
from torch.autograd import profiler
from torch.optim import optimizer as for_all
from torch.utils import _pytree as pytree

from asyncrpc.core.arguments import shown
from asyncrpc.core.autograd.inline import (
    PLAIN,
    SMALL,
    SMALL_NUMEL,
    GradientLock,
    GradientsSetAside,
    are_operators_torchs,
    without_functions,
)
from asyncrpc.core.optim.options import Changes, Options, options_of, set_options
from asyncrpc.core.optim.snapshot import Snapshot
from asyncrpc.core.serde import words_of
from asyncrpc.errors import OptimizerError

_observed: Callable[[], bool] = torch._C._autograd._profiler_enabled  # noqa: SLF001
_wrap: Any = torch.optim.Optimizer.profile_hook_step
_WRAPPER: Final = _wrap(lambda _optimizer: None).__code__


def plain_step_of(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    """Return a function that does `optimizer.step()`.

    Hooks, profilers and wrappers may be added at any time: each call looks for them.
    """
    untyped: Any = optimizer
    wrapped: Any = type(untyped).step
    bare = _unwrapped(wrapped)

    def step() -> None:
        if (
            bare is wrapped  # not torch's wrapper
            or type(untyped).step is not wrapped
            or "step" in vars(untyped)  # a scheduler of learning rates has wrapped it
            or untyped._optimizer_step_pre_hooks  # noqa: SLF001
            or untyped._optimizer_step_post_hooks  # noqa: SLF001
            or for_all._global_optimizer_pre_hooks  # noqa: SLF001
            or for_all._global_optimizer_post_hooks  # noqa: SLF001
            or profiler._is_profiler_enabled  # noqa: SLF001
            or _observed()
        ):
            untyped.step()
        else:
            bare(untyped)

    return step


def _unwrapped(step: Any) -> Any:
    """Return what torch has wrapped, else `step` itself."""
    is_wrapper = type(step) is FunctionType and step.__code__ is _WRAPPER
    return step.__wrapped__ if is_wrapper else step


# torch wraps the step of a class when its first optimizer is made.
_STEPS: Final[dict[type, Any]] = {
    kind: _unwrapped(kind.step)
    for kind in vars(torch.optim).values()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
}
_HOOKS: Final = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
# Of options and state.  What else they hold may have methods of the user's.
_PLAIN_OR_NONE: Final = PLAIN | {type(None)}
_VALUES: Final = _PLAIN_OR_NONE | {bool, int, float, str}
_SEQUENCES: Final = frozenset((tuple, list))  # betas, and the parameters of a group
_OWN: Final = _VALUES | {dict, list, OrderedDict, defaultdict}  # of an optimizer
_NAMES: Final = frozenset((str,))


def steps_torch_only(optimizer: Any, gradients: Iterable[Any]) -> bool:
    """Return whether a step calls torch's own code only, now.

    Args:
        gradients: of its parameters; None for a missing gradient.
    """
    kind = type(optimizer)
    step = _STEPS.get(kind)
    if step is None or _unwrapped(kind.step) is not step or not are_operators_torchs():
        return False
    own = vars(optimizer)
    return (
        _has_plain_names(own)
        # A scheduler replaces `step`; a GradScaler sets tensors that a step reads.
        and _OWN.issuperset(map(type, own.values()))
        and not any(own[name] for name in _HOOKS)
        and not for_all._global_optimizer_pre_hooks  # noqa: SLF001
        and not for_all._global_optimizer_post_hooks  # noqa: SLF001
        and _PLAIN_OR_NONE.issuperset(map(type, gradients))
        and type(own["defaults"]) is dict
        and _has_plain_names(own["defaults"])  # a step reads one
        and type(own["defaults"].get("differentiable")) is bool
        and all(map(_is_plain_dict, own["param_groups"]))
        and _is_plain_state(own["state"])
    )


def _has_plain_names(values: dict[Any, Any]) -> bool:
    """Return whether looking a name up calls no `__eq__` of the user's."""
    return _NAMES.issuperset(map(type, values))


def _is_plain_dict(values: Any) -> bool:
    if type(values) is not dict or not _has_plain_names(values):
        return False
    for value in values.values():
        kind = type(value)
        if kind not in _VALUES and not (
            kind in _SEQUENCES and _VALUES.issuperset(map(type, value))
        ):
            return False
    return True


def _is_plain_state(state: Any) -> bool:
    return (
        type(state) is defaultdict
        and state.default_factory is dict
        and PLAIN.issuperset(map(type, state))
        and all(map(_is_plain_dict, state.values()))
    )


Gathered: TypeAlias = Mapping[torch.Tensor, torch.Tensor]
# In the order of the parameters; None where the context has none.
Gradients: TypeAlias = Sequence[torch.Tensor | None]

_SMALLEST_NORM: Final = 1e-6  # as torch.nn.utils.clip_grad_norm_ adds to the norm


class LocalParameters:
    """Parameters of this worker, and the lock over them.

    Every method but `gradients` may block, on the lock that backward passes of this
    worker also take: call it in a thread.

    Attributes:
        listed: the parameters, group by group.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], lock: GradientLock) -> None:
        self._lock = lock  # over `.grad` of every parameter here
        self._list(parameters)

    def _list(self, parameters: Iterable[torch.Tensor]) -> None:
        self.listed = list(parameters)
        self.keys = frozenset(id(parameter) for parameter in self.listed)

    def gradients(self, gathered: Gathered) -> Gradients:
        """Return the gradients that belong to our parameters."""
        return [gathered.get(parameter) for parameter in self.listed]

    def values(self) -> list[torch.Tensor]:
        """Return a copy of the parameters, of one moment, in the host's memory."""
        with self._lock:
            return [
                parameter.detach().to("cpu", copy=True) for parameter in self.listed
            ]

    def assign(self, values: Sequence[torch.Tensor], *, allow_stale: bool) -> None:
        """Set the parameters."""
        with self._lock, torch.no_grad():
            for parameter, value in zip(self.listed, values, strict=True):
                (parameter.data if allow_stale else parameter).copy_(value)

    def snapshot(self) -> Snapshot:
        """Return a snapshot that can be restored; it takes no lock."""
        return Snapshot(self.listed)

    def locked(self, job: Callable[[], Any]) -> Any:
        """Run a job under the lock."""
        with self._lock:
            return job()


class LocalOptimizer(LocalParameters):
    """An optimizer, and the record of its steps."""

    def __init__(self, optimizer: torch.optim.Optimizer, lock: GradientLock) -> None:
        self._optimizer = optimizer
        self._take_step = plain_step_of(optimizer)
        # Of each parameter: the layout of a gradient that it has been stepped with.
        self._proven: list[torch.layout | None] = []
        super().__init__((), lock)
        self._look()

    def kind(self, gradients: Gradients) -> Hashable | None:
        """Return a key shared by steps that take about as long.

        It is None for steps that may call user code, or of large tensors.
        """
        if not self._is_small or not self.is_sure(gradients):
            return None
        return id(self), sum(gradient is not None for gradient in gradients)

    def is_sure(self, gradients: Gradients) -> bool:
        """Return whether a step with these gradients cannot raise, as things are now.

        It calls torch's own code only, and a step with such gradients succeeded before.
        """
        if len(gradients) != len(self._proven):
            return False  # a group is just being added
        return steps_torch_only(self._optimizer, gradients) and all(
            gradient is None or gradient.layout is layout
            for gradient, layout in zip(gradients, self._proven, strict=True)
        )

    def step(
        self,
        gradients: Gradients,
        scale: float,
        differing: Changes,
        *,
        allow_stale: bool,
        is_sure: bool = False,
    ) -> None:
        """Step with these gradients times `scale`; the gradients do not change.

        Args:
            is_sure: whether `is_sure` has just said so, on this thread.
        """
        with self._lock:
            if not (is_sure or self.is_sure(gradients)):
                self._step_or_undo(gradients, scale, differing, allow_stale=allow_stale)
                return
            try:
                set_options(self._optimizer, differing)
                self._step(gradients, scale, allow_stale=allow_stale)
            except BaseException as error:
                raise OptimizerError(
                    f"{words_of(error)}; the step may be applied in part here: load "
                    "the last checkpoint"
                ) from error

    def step_kept(
        self,
        gradients: Gradients,
        scale: float,
        differing: Changes,
        *,
        allow_stale: bool,
    ) -> Snapshot:
        """Step in the same way, and return the snapshot that undoes it."""
        with self._lock:
            return self._step_or_undo(
                gradients, scale, differing, allow_stale=allow_stale
            )

    def _step_or_undo(
        self,
        gradients: Gradients,
        scale: float,
        differing: Changes,
        *,
        allow_stale: bool,
    ) -> Snapshot:
        snapshot = self.snapshot()
        try:
            set_options(self._optimizer, differing)
            self._step(gradients, scale, allow_stale=allow_stale)
        except BaseException:
            snapshot.restore()
            raise
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                self._proven[index] = gradient.layout
        return snapshot

    def _step(self, gradients: Gradients, scale: float, *, allow_stale: bool) -> None:
        """Step with `.grad` set aside; the lock is held."""
        if allow_stale:
            with _on_aliases(self._optimizer) as aliases:
                self._step_on(aliases, gradients, scale)
        else:
            self._step_on(self.listed, gradients, scale)

    def _step_on(
        self, parameters: Sequence[torch.Tensor], gradients: Gradients, scale: float
    ) -> None:
        with GradientsSetAside(self._lock, parameters, scaled(gradients, scale)):
            self._take_step()

    def snapshot(self) -> Snapshot:
        """Return what puts everything back; it takes no lock."""
        return Snapshot(self.listed, self._optimizer)

    def set_options(self, differing: Changes) -> None:
        """Set options of groups, including those that may make a step raise."""
        with self._lock:
            self._proven = [None] * len(self.listed)
            set_options(self._optimizer, differing)

    def add_group(self, group: dict[str, Any]) -> list[Options]:
        """Add a group of parameters; return the options of all groups."""
        with self._lock:
            self._optimizer.add_param_group(group)
            self._look()
            return options_of(self._optimizer)

    def state(self) -> dict[str, Any]:
        """Return a copy of the state, of one moment, in the host's memory."""
        with self._lock:
            copied = copy.deepcopy(self._optimizer.state_dict())
        if not _is_state(copied):
            name = type(self._optimizer).__name__
            raise OptimizerError(
                f"state_dict() of {name} must return a mapping of 'state' to one by "
                f"parameter and of 'param_groups' to a list, not {shown(copied)}"
            )
        state: dict[str, Any] = in_host_memory(copied)
        return state

    def load_state(self, state: Mapping[str, Any]) -> list[Options]:
        """Load a state that `state` returned; return the options of all groups."""
        with self._lock:
            # torch does not check its shapes: a step with it may raise.
            self._proven = [None] * len(self.listed)
            self._optimizer.load_state_dict(dict(state))
            return options_of(self._optimizer)

    def _look(self) -> None:
        """List the optimizer's parameters."""
        groups = self._optimizer.param_groups
        self._list(parameter for group in groups for parameter in group["params"])
        self._proven += [None] * (len(self.listed) - len(self._proven))
        self._is_small = len(self.listed) <= SMALL and all(
            parameter.numel() <= SMALL_NUMEL for parameter in self.listed
        )


def _is_state(candidate: Any) -> bool:
    if not issubclass(type(candidate), Mapping):  # by type: `__class__` may differ
        return False
    groups, state = candidate.get("param_groups"), candidate.get("state")
    return issubclass(type(state), Mapping) and issubclass(type(groups), list)


def in_host_memory(tree: Any) -> Any:
    """Return a tree of values with its tensors in the host's memory."""
    return pytree.tree_map_only(
        torch.Tensor,
        lambda tensor: tensor.to("cpu"),
        tree,
        is_leaf=_is_whole,
    )


def _is_whole(part: Any) -> bool:
    """Return whether a tuple would not be built again as it was."""
    return isinstance(part, tuple) and (
        type(part) is torch.Size or hasattr(part, "__dict__")
    )


@contextmanager
def _on_aliases(optimizer: torch.optim.Optimizer) -> Iterator[list[torch.Tensor]]:
    """Let an optimizer change its parameters unnoticed by their graphs.

    It works on tensors that share their memory and have version counters of their own.
    Resetting the parameters' counters afterwards would be wrong: a forward pass in
    another thread during the step would save a version that never existed.
    """
    groups, state = list(optimizer.param_groups), optimizer.state
    kept = [group["params"] for group in groups]
    listed = [parameter for parameters in kept for parameter in parameters]
    aliases = [parameter.data for parameter in listed]
    pairs = list(zip(listed, aliases, strict=True))
    try:
        _rename(state, pairs)
        unused_aliases = iter(aliases)
        for group, parameters in zip(groups, kept, strict=True):
            group["params"] = [next(unused_aliases) for _ in parameters]
        yield aliases
    finally:
        for group, parameters in zip(groups, kept, strict=True):
            group["params"] = parameters
        _rename(state, [(alias, parameter) for parameter, alias in pairs])


def _rename(
    state: MutableMapping[Any, Any], pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]
) -> None:
    if not state:  # torch takes 0.2 us to tell whether a tensor is in it
        return
    for old, new in pairs:
        if old in state:
            state[new] = state.pop(old)


def check_parameters(values: Sequence[Any]) -> None:
    """Refuse values that an optimizer cannot change."""
    for index, value in enumerate(values):
        if not isinstance(value, torch.Tensor):
            kind = type(value).__name__
            raise OptimizerError(
                f"parameter {index} is a {kind}, not a tensor; pass RRefs to parameters"
            )
        with without_functions():
            is_leaf = value.is_leaf
        if not is_leaf:
            raise OptimizerError(
                f"parameter {index} of shape {tuple(value.shape)} is not a leaf "
                "tensor: it was computed from others; optimize those instead"
            )


def scaled(gradients: Gradients, scale: float) -> Gradients:
    """Return gradients times `scale`; the same ones if it is 1."""
    if scale == 1.0:
        return gradients
    return [None if gradient is None else gradient * scale for gradient in gradients]


def squares(gradients: Gradients) -> list[float]:
    """Return numbers whose sum is, exactly, that of the squared norms of gradients.

    They have double precision, because squares in half precision would overflow at a
    norm of 256.  As the sum is exact, the norm over all owners is the same to the last
    bit, however the parameters are spread over them.
    """
    norms: dict[torch.device, list[torch.Tensor]] = {}
    for gradient in gradients:
        if gradient is not None:
            norms.setdefault(gradient.device, []).append(_norm(gradient))
    # One wait for each device, not for each gradient.
    listed = [
        norm
        for device_norms in norms.values()
        for norm in torch.stack(device_norms).tolist()
    ]
    return exact_sum([norm * norm for norm in listed])


def norm_of(parts: Iterable[float]) -> float:
    """Return the norm of gradients, of one owner's `squares` or of several'."""
    return math.sqrt(math.fsum(parts))


def exact_sum(values: Sequence[float]) -> list[float]:
    """Return a few numbers with the same sum as many, without rounding.

    Source: Shewchuk, 1997, as math.fsum does it inside.
    """
    if not all(math.isfinite(value) for value in values):
        return [sum(values)]
    parts: list[float] = []
    for value in values:
        carried, kept = value, []
        for part in parts:
            high = carried + part
            large, small = sorted((carried, part), key=abs, reverse=True)
            low = small - (high - large)
            if low:
                kept.append(low)
            carried = high
        parts = [*kept, carried]
    return parts


def _norm(gradient: torch.Tensor) -> torch.Tensor:
    dense = gradient.coalesce().values() if gradient.is_sparse else gradient
    real = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
    norm: torch.Tensor = torch.linalg.vector_norm(real, dtype=torch.float64)
    return norm


def scale_for(
    norm: float | None, clip_norm: float | None, *, skip_nonfinite: bool
) -> float | None:
    """Return the factor for gradients of this norm; None skips the step.

    Source: torch.nn.utils.clip_grad_norm_.
    """
    if norm is None or (skip_nonfinite and not math.isfinite(norm)):
        return None if norm is not None else 1.0
    if clip_norm is None:
        return 1.0
    scale = clip_norm / (norm + _SMALLEST_NORM)
    return min(scale, 1.0)  # in this order a NaN stays one
