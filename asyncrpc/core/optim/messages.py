"""The messages of distributed optimizers to the owners of their parameters.

Each begins with the number of the optimizer at its maker, which sends all of them.
docs/reference/wire-protocol.md has them all.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch

from asyncrpc.core.ids import ContextId
from asyncrpc.core.optim.options import GroupChange, Options
from asyncrpc.core.services.schema import Count, Notice, Request, Spread, message

SERVICE: Final = "optim"


class MadeOptimizer(NamedTuple):
    """A local optimizer that has been made.

    Attributes:
        options: of each group.
        defaults: of later groups.
    """

    options: list[Options]
    defaults: Options


@message(
    SERVICE,
    "create",
    about="an optimizer of the sender, of parameters that it refers to",
)
class CreateOptimizer(Request[MadeOptimizer | None]):
    """Make a local optimizer, or, without a class, list the parameters.

    Attributes:
        serial: number of the optimizer at its maker.
        optimizer_class: makes the local optimizer; None: the answer is None.
        params_rref: the groups, with references to their parameters.
        args: of the class.
        kwargs: of the class.
    """

    serial: Count
    optimizer_class: Any
    params_rref: list[dict[str, Any]]
    args: list[Any]
    kwargs: dict[str, Any]


class Applying(NamedTuple):
    """How a step is applied.

    Attributes:
        allow_stale: hide the change from graphs that hold the parameters.
        differing: options to set before.
    """

    allow_stale: bool
    differing: list[GroupChange]


class StepTaken(NamedTuple):
    """The result of a step on one owner.

    Attributes:
        gradients: how many parameters had a gradient.
        norm: of the gradients; None if it was not needed.
        is_applied: False if the step was skipped.
    """

    gradients: Count
    norm: float | None
    is_applied: bool


@message(SERVICE, "step", about="an optimizer that the sender has made")
class TakeStep(Request[StepTaken]):
    """Prepare and commit in one: the receiver is the only owner."""

    serial: Count
    context_id: Spread[ContextId]
    clip_norm: float | None
    skip_nonfinite: bool
    how: Spread[Applying]


class StepVote(NamedTuple):
    """The vote of an owner on a step before it is taken.

    Attributes:
        gradients: how many parameters have a gradient.
        squares: of the gradients, if they were asked for.
        is_sure: whether the step cannot raise.
    """

    gradients: Count
    squares: list[float]
    is_sure: bool


@message(SERVICE, "prepare", about="an optimizer that the sender has made")
class PrepareStep(Request[StepVote]):
    """Vote on a step."""

    serial: Count
    context_id: Spread[ContextId]
    needs_norm: bool


@message(SERVICE, "commit", about="an optimizer that the sender has made")
class CommitStep(Request[Count]):
    """Take a step; the answer is how many parameters had a gradient.

    Attributes:
        serial: number of the optimizer at its maker.
        context_id: whose gradients are applied.
        scale: the factor of each gradient.
        is_kept: keep a snapshot that undoes the step, and keep other steps off the
            parameters, until it is settled.
        how: how the step is applied.
    """

    serial: Count
    context_id: Spread[ContextId]
    scale: float
    is_kept: bool
    how: Spread[Applying]


@message(SERVICE, "settle", about="an optimizer that the sender has made")
class SettleStep(Request[None]):
    """Settle a kept step, if there is one: confirm it, or undo it."""

    serial: Count
    is_applied: bool


@message(SERVICE, "begin", about="an optimizer that the sender has made")
class BeginStep(Request[list[torch.Tensor]]):
    """Keep the parameters as they are, until `SettleStep`; return their values."""

    serial: Count


@message(SERVICE, "assign", about="an optimizer that the sender has made")
class AssignValues(Request[None]):
    """Set the parameters, between `BeginStep` and `SettleStep`."""

    serial: Count
    values: list[torch.Tensor]
    allow_stale: bool


@message(SERVICE, "gradients", about="an optimizer that the sender has made")
class GetGradients(Request[list[torch.Tensor | None]]):
    """Return the gradients of the parameters in a context."""

    serial: Count
    context_id: Spread[ContextId]


@message(SERVICE, "values", about="an optimizer that the sender has made")
class GetValues(Request[list[torch.Tensor]]):
    """Return the values of the parameters."""

    serial: Count


@message(SERVICE, "add_group", about="an optimizer that the sender has made")
class AddGroup(Request[list[dict[str, Any]]]):
    """Add a group; return the options of all."""

    serial: Count
    group: dict[str, Any]


@message(SERVICE, "state", about="an optimizer that the sender has made")
class GetState(Request[dict[str, Any]]):
    """Return the state of the local optimizer."""

    serial: Count


@message(SERVICE, "load_state", about="an optimizer that the sender has made")
class LoadState(Request[list[dict[str, Any]]]):
    """Load a state; return the options of all groups."""

    serial: Count
    state: dict[str, Any]


@message(SERVICE, "set_options", about="an optimizer that the sender has made")
class SetOptions(Request[None]):
    """Set options that may make a step raise."""

    serial: Count
    differing: list[GroupChange]


@message(SERVICE, "drop", about="an optimizer that the sender has made")
class DropOptimizer(Notice):
    """Let go of an optimizer that its maker has let go of."""

    serial: Count
