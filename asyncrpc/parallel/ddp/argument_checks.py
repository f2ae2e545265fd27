"""Arguments of data parallel training, checked before anything begins."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from asyncrpc.core.arguments import check_callable, check_kind, check_sequence, wrong
from asyncrpc.core.torch_modes import with_defaults
from asyncrpc.errors import UsageError
from asyncrpc.parallel.collectives.group import Group
from asyncrpc.parallel.ddp.bucket import GradBucket


def check_group(group: object, name: str = "group") -> None:
    """Raise UsageError unless an argument is a group."""
    check_kind(name, group, Group, "a Group")


def check_bucket(bucket: object) -> None:
    """Raise UsageError unless an argument is a bucket."""
    check_kind("bucket", bucket, GradBucket, "a GradBucket")


def check_hook(state: object, kind: type, bucket: object) -> None:
    """Raise UsageError unless these are the arguments of a hook."""
    check_kind("state", state, kind, f"a {kind.__name__}")
    check_bucket(bucket)


def check_closure(closure: Callable[[], Any] | None) -> None:
    """Raise UsageError unless an argument computes a loss, or is None."""
    if closure is not None:
        check_callable("closure", closure)


def check_param_group(param_group: object) -> None:
    """Raise UsageError unless an argument is a group of parameters."""
    if not isinstance(param_group, Mapping) or "params" not in param_group:
        wanted = "a dictionary with 'params', and options"
        raise wrong("param_group", wanted, param_group)


def check_state(state: object, keys: Sequence[str], name: str = "state_dict") -> None:
    """Raise UsageError unless an argument is a dictionary that has these keys."""
    check_kind(name, state, Mapping, "what state_dict() returned")
    assert isinstance(state, Mapping)  # checked above
    missing = [key for key in keys if key not in state]
    if missing:
        raise UsageError(
            f"{name} must be what state_dict() returned, but it has no {missing[0]!r}"
        )


@with_defaults
def check_roots(roots: Any, gradient: Any) -> list[torch.Tensor]:
    """Return the tensors that a backward pass begins at."""
    if isinstance(roots, torch.Tensor):
        roots, gradient = [roots], [gradient]
    check_sequence("loss", roots, "a tensor, a list of tensors, or a function")
    if gradient is None:
        gradient = [None] * len(roots)
    check_sequence("gradient", gradient, "a list with a tensor for each loss")
    if len(gradient) != len(roots):
        raise UsageError(
            f"gradient must have one tensor for each of the {len(roots)} losses, not "
            f"{len(gradient)}"
        )
    for root, root_gradient in zip(roots, gradient, strict=True):
        _check_root(root, root_gradient)
    return list(roots)


def _check_root(root: Any, gradient: Any) -> None:
    wanted = "a tensor, a list of tensors, or a function"
    check_kind("loss", root, torch.Tensor, wanted)
    if not root.requires_grad:
        raise UsageError(
            f"loss must require a gradient, but a tensor of shape {tuple(root.shape)} "
            "does not"
        )
    if gradient is None:
        if root.numel() != 1:
            raise UsageError(
                f"loss of shape {tuple(root.shape)} is not a scalar: pass its gradient"
            )
        return
    check_kind("gradient", gradient, torch.Tensor, "a tensor")
    if gradient.shape != root.shape:
        raise UsageError(
            f"gradient must have the shape of its loss, {tuple(root.shape)}, not "
            f"{tuple(gradient.shape)}"
        )


@contextmanager
def named(argument: str) -> Iterator[None]:
    """Name an argument in the errors that torch's optimizers raise for it."""
    try:
        yield
    except (TypeError, ValueError, KeyError, RuntimeError) as error:
        raise UsageError(f"{argument}: {error}") from error
