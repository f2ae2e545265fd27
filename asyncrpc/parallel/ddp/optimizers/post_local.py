"""`PostLocalSGDOptimizer`: each rank steps by itself, and parameters are averaged.

Source: torch/distributed/optim/post_localSGD_optimizer.py; Lin et al., "Don't Use Large
Mini-Batches, Use Local SGD", ICLR 2020.
"""

from __future__ import annotations

import inspect
import logging
from typing import Any, Final, NoReturn

import torch

from asyncrpc.core.arguments import check_count, check_flag, check_kind
from asyncrpc.core.torch_modes import plain_steps
from asyncrpc.errors import UsageError
from asyncrpc.parallel.ddp.argument_checks import (
    check_closure,
    check_param_group,
    check_state,
    named,
)
from asyncrpc.parallel.ddp.optimizers.averaging import ModelAverager
from asyncrpc.parallel.ddp.optimizers.local_step import (
    Closure,
    step_in_thread,
    with_modes_here,
)

logger = logging.getLogger("asyncrpc")

# torch keeps hooks here: they are those of the inner optimizer.
_HOOKS: Final = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


class PostLocalSGDOptimizer(torch.optim.Optimizer):
    """An optimizer of this rank that averages parameters after its steps.

    Groups, options, state and hooks are those of the inner optimizer, so torch's
    schedulers work with it.

    Attributes:
        optim: the optimizer within, as given.
        averager: as given.

    Example:
        >>> state = PostLocalSGDState(None, None, start_localSGD_iter=100)
        >>> model.register_comm_hook(state, post_localSGD_hook)
        >>> optimizer = PostLocalSGDOptimizer(
        ...     torch.optim.SGD(model.parameters(), lr=0.01),
        ...     PeriodicModelAverager(group, period=4, warmup_steps=100),
        ... )
        >>> await optimizer.step()

    Source: torch's `PostLocalSGDOptimizer`.
    """

    def __init__(self, optim: torch.optim.Optimizer, averager: ModelAverager) -> None:
        """Put an optimizer and an averager together; nothing is sent.

        Args:
            optim: of this rank's parameters; one of torch's, or alike.
            averager: says when parameters are averaged, and over which ranks.

        Raises:
            UsageError: the step of `optim` is a coroutine, so it keeps ranks together
                itself; or an argument has the wrong type.
        """
        check_kind("optim", optim, torch.optim.Optimizer, "a torch.optim.Optimizer")
        check_kind("averager", averager, ModelAverager, "a ModelAverager")
        # torch's constructor would make groups and state of its own.
        if inspect.iscoroutinefunction(type(optim).step):
            raise UsageError(
                f"a {type(optim).__name__} keeps the parameters of all ranks together, "
                "so they need no averaging; use one or the other"
            )
        self.optim = optim
        self.averager = averager
        for name in _HOOKS:
            setattr(self, name, getattr(optim, name))
        self._joinable = averager._joinable  # noqa: SLF001  (one part of `Join`)
        self._joinable.shadow = self.step

    @property
    def param_groups(self) -> Any:  # type: ignore[override]  # a variable there
        """Groups of parameters and their options."""
        return self.optim.param_groups

    @property
    def defaults(self) -> Any:  # type: ignore[override]  # likewise
        """Options of groups that do not have them."""
        return self.optim.defaults

    @property
    def state(self) -> Any:  # type: ignore[override]  # likewise
        """State of the optimizer, by parameter."""
        return self.optim.state

    def __repr__(self) -> str:
        return repr(self.optim)

    async def step(  # type: ignore[override]  # it waits for others
        self, closure: Closure | None = None
    ) -> Any:
        """Step this rank's parameters, in a thread; then average them, if that is due.

        If the averaging fails, this rank has made its step.  Call
        `average_parameters(optimizer.param_groups)` on `optimizer.averager` at every
        rank to try again.

        Args:
            closure: computes the loss and its gradients.  A coroutine function is
                called once, before the step; a plain function is called by the
                optimizer, in its thread, as often as the optimizer needs.

        Returns:
            The result of `closure`, or of the optimizer's step.

        Raises:
            UsageError: ranks have other parameters with gradients than the first;
                `closure` cannot be called; or this is not the worker's event loop.
            CollectiveError: the averaging has failed for all ranks that have not ended
                it.
            Exception: the error of the optimizer or of `closure`.

        Cancellation:
            The optimizer's own step is ended first; then an averaging fails for all
            ranks that have not ended it.

        Source: torch's `PostLocalSGDOptimizer.step`.
        """
        check_closure(closure)
        self.averager.group.host.check_on_loop("PostLocalSGDOptimizer.step")
        return await self._step(with_modes_here(closure))

    # Otherwise torch wraps it in a function that calls hooks before it has ended.
    step.hooked = True  # type: ignore[attr-defined]

    @plain_steps
    async def _step(self, closure: Closure | None) -> Any:
        loss = await step_in_thread(self.optim, closure, self.averager.group.host)
        await self.averager.average_parameters(self.optim.param_groups)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002  (torch's signature)
        """Remove the gradients, or set them to zero.

        Args:
            set_to_none: take them away.

        Raises:
            UsageError: `set_to_none` is neither True nor False.
        """
        check_flag("set_to_none", set_to_none)
        self.optim.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters.

        Args:
            param_group: `params`, and options.

        Raises:
            UsageError: `param_group` is not a group, or the inner optimizer refuses it.
        """
        check_param_group(param_group)
        with named("param_group"):
            self.optim.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer, and as `step` that of the averager."""
        return {**self.optim.state_dict(), "step": self.averager.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, and continue at its step.

        Args:
            state_dict: the result of `state_dict`, here or of torch's class.  Without
                `step` the averager begins again, with a warning in the log.

        Raises:
            UsageError: `state_dict` is not a state, or the inner optimizer refuses it.
        """
        check_state(state_dict, ("state", "param_groups"))
        check_count("state_dict['step']", state_dict.get("step", 0))
        with named("state_dict"):
            self.optim.load_state_dict(state_dict)
        if "step" not in state_dict:
            logger.warning(
                "the loaded state has no `step`: the averager begins at 0, with its "
                "warm-up"
            )
        self.averager.step = state_dict.get("step", 0)

    def __getstate__(self) -> NoReturn:
        """Refuse: a group cannot be saved.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            "a PostLocalSGDOptimizer cannot be copied or pickled, as its averager "
            "belongs to a group: save its `state_dict()`"
        )
