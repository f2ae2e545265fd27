"""`ZeroRedundancyOptimizer`: each rank steps a share of the parameters.

An optimizer of the user's class runs at every rank, over the parameters that this rank
owns, so the memory for its state is shared out.  After its step every rank gets the
parameters of all owners.  The groups of all parameters have the options, which a
program and its schedulers change; they are copied to the rank's own groups before a
step, and back after it.

Source: torch/distributed/optim/zero_redundancy_optimizer.py; Rajbhandari et al., "ZeRO:
Memory Optimizations Toward Training Trillion Parameter Models", 2020.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final, NoReturn, TypeAlias

import torch

from asyncrpc.core.arguments import check_flag, check_kind, listed, wrong
from asyncrpc.core.param_groups import OF_PARAMETERS, options_in
from asyncrpc.core.torch_modes import plain_steps
from asyncrpc.errors import OptimizerError, UsageError
from asyncrpc.parallel.collectives.argument_checks import check_rank
from asyncrpc.parallel.collectives.group import Group
from asyncrpc.parallel.ddp.argument_checks import (
    check_closure,
    check_group,
    check_param_group,
    named,
)
from asyncrpc.parallel.ddp.initial import verify
from asyncrpc.parallel.ddp.joining import Joinable
from asyncrpc.parallel.ddp.optimizers.local_step import (
    Closure,
    call_hooks_after,
    call_hooks_before,
    step_in_thread,
    with_modes_here,
)
from asyncrpc.parallel.ddp.optimizers.sharded_state import (
    State,
    copied,
    from_bytes,
    part_of,
    to_bytes,
    with_places,
)
from asyncrpc.parallel.ddp.optimizers.shards import Partition, Shards, is_sent
from asyncrpc.parallel.ddp.recreatable_group import RecreatableGroup, reason_for
from asyncrpc.parallel.ddp.threads import in_thread, user_of

Params: TypeAlias = (
    Iterable[torch.Tensor]
    | Iterable[dict[str, Any]]
    | Iterable[tuple[str, torch.Tensor]]
)

# Options of a group that can be compared by their text.
_PLAIN: Final = (bool, int, float, str, tuple, type(None))


class ZeroRedundancyOptimizer(torch.optim.Optimizer):
    """An optimizer whose state is shared out among the ranks of a group.

    Every rank makes one of the same parameters; each parameter is owned by one rank,
    which keeps its state, steps it, and sends it to all.  All ranks must have the same
    gradients, as after `DistributedDataParallel`.  The result is that of the optimizer
    on one rank, to the last bit, if that treats each parameter by itself, as all of
    torch's do except LBFGS.

    torch's schedulers work with it; `param_groups` and `zero_grad` are of all
    parameters, `state` is this rank's.

    If a step fails, parameters may differ between ranks: then `step` and
    `consolidate_state_dict` raise until `synchronize` has ended or a state has been
    loaded.  As long as no rank is lost, nothing is lost: each owner has its share.

    Attributes:
        group: as given.
        optim: the optimizer of this rank's share.

    Example:
        >>> optimizer = ZeroRedundancyOptimizer(
        ...     model.parameters(), torch.optim.AdamW, group, lr=0.01
        ... )
        >>> await model.backward(model(inputs).square().mean())
        >>> await optimizer.step()

    Source: torch.distributed.optim.ZeroRedundancyOptimizer, whose partition this is.
    Parameters of several dtypes are allowed here; there is no `overlap_with_ddp`.
    """

    optim: torch.optim.Optimizer

    def __init__(
        self,
        params: Params,
        optimizer_class: type[torch.optim.Optimizer],
        group: Group,
        *,
        parameters_as_bucket_view: bool = False,
        **defaults: Any,
    ) -> None:
        """Share out the parameters; nothing is sent before the first step.

        Args:
            params: tensors, pairs of names and tensors, or groups of them with options:
                dense, in host memory or on devices, the same at every rank.
            optimizer_class: makes the optimizer of each rank's share.
            group: the ranks; the optimizer gets a group of its own, so that its
                collectives do not interfere with yours.
            parameters_as_bucket_view: let the parameters of each owner lie in one
                stretch of host memory, from which they are sent without a copy.
            **defaults: options of groups that do not have them, for `optimizer_class`.

        Raises:
            UsageError: a parameter is sparse, on `meta`, given twice, or on a device
                with `parameters_as_bucket_view`; an argument has the wrong type, or
                torch's optimizers refuse it.
        """
        check_group(group)
        check_flag("parameters_as_bucket_view", parameters_as_bucket_view)
        _check_class(optimizer_class)
        self.group = group
        self._is_made = False
        with named("params"):
            super().__init__(_iterable(params), defaults)
        self._partition = Partition(group.size)
        self._owners = [self._share(added["params"]) for added in self.param_groups]
        self._shards = Shards(
            group.rank, group.size, as_views=parameters_as_bucket_view
        )
        own = [self._part(index) for index in range(len(self.param_groups))]
        with named(f"defaults of {optimizer_class.__name__}"):
            self.optim = optimizer_class(own, **defaults)
        self.defaults = self.optim.defaults
        self._take_options()
        for added, owners in zip(self.param_groups, self._owners, strict=True):
            self._shards.add(added["params"], owners)
        self._shards.refresh()
        self._own = RecreatableGroup(group)
        self._joinable = Joinable(self._step)
        self._is_met = False  # whether all ranks have the same parameters and options
        self._running = ""  # the method under way
        self._torn = ""  # the method that did not end, so that ranks may differ
        self._whole: State | None = None
        self._is_made = True

    def _share(self, parameters: list[torch.Tensor]) -> list[int]:
        return self._partition.add([parameter.numel() for parameter in parameters])

    def _part(self, index: int) -> dict[str, Any]:
        """Return a group with the parameters of this rank only."""
        whole = self.param_groups[index]
        pairs = zip(whole["params"], self._owners[index], strict=True)
        params = [parameter for parameter, owner in pairs if owner == self.group.rank]
        return {**options_in(whole), "params": params}

    @property
    def state(self) -> Any:
        """State of the parameters that this rank owns."""
        return self.optim.state

    @state.setter
    def state(self, value: Any) -> None:
        # torch's constructor sets it, before the inner optimizer exists.
        del value

    # --- steps -----------------------------------------------------------------------

    async def step(  # type: ignore[override]  # it waits for others
        self, closure: Closure | None = None
    ) -> Any:
        """Step this rank's parameters, in a thread, and then get those of all ranks.

        Args:
            closure: computes the loss and its gradients.  A coroutine function is
                called once, before the step; a plain function is called by the
                optimizer, in its thread, as often as the optimizer needs.

        Returns:
            The result of `closure`, or of the optimizer's step.

        Raises:
            UsageError: ranks have other parameters or options than rank 0, which are
                compared before the first step and after a change: no parameter has
                changed.  Or another step is under way, `closure` cannot be called, a
                `join` is active that does not know this optimizer, or this is not the
                worker's event loop.
            OptimizerError: an earlier step has failed; see the class.
            CollectiveError: a rank failed; the step fails on all ranks that have not
                ended it, but this rank's parameters have been stepped.  If a rank is
                lost, so is its state: load a checkpoint in a new group.
            Exception: the error of the optimizer or of `closure`; the other ranks get
                a CollectiveError.

        Cancellation:
            The optimizer's own step is ended first.  The others get a CollectiveError.

        Source: torch's `ZeroRedundancyOptimizer.step`.
        """
        check_closure(closure)
        self._joinable.check("a step of ZeroRedundancyOptimizer")
        if closure is not None and self._joinable.announce is not None:
            raise UsageError(
                "closure cannot be used within a `Join`: call `model.backward` before "
                "the step"
            )
        return await self._step(with_modes_here(closure))

    # Otherwise torch wraps it in a function that calls hooks before it has ended.
    step.hooked = True  # type: ignore[attr-defined]

    @plain_steps
    async def _step(self, closure: Closure | None = None) -> Any:
        async with self._together("step") as group:
            await self._joinable.begin()
            closure = call_hooks_before(self, closure)
            await self._meet(group)
            self._whole = None
            self._torn = "step"
            self._give_options()
            loss = await step_in_thread(self.optim, closure, group.host)
            self._take_options()
            await self._shards.synchronize(group)
            self._torn = ""
        call_hooks_after(self, closure)
        return loss

    @plain_steps
    async def synchronize(self) -> None:
        """Give every rank the parameters of each owner; all ranks must call it.

        After a failed step this makes all ranks equal again.  A share that its owner
        did not step is then that of the step before.

        Raises:
            UsageError: ranks have other parameters or options than rank 0, or call
                another method; or a step is under way.
            CollectiveError: a rank failed; the call fails on all ranks that have not
                ended it.  Repeat it, unless a rank is lost.

        Cancellation:
            The call fails on all ranks that have not ended it.
        """
        async with self._together("synchronize", repairs=True) as group:
            self._is_met = False
            await self._meet(group)
            self._torn = self._torn or "synchronize"
            await self._shards.synchronize(group)
            self._torn = ""

    def _check_idle(self) -> None:
        """Raise UsageError while a method of this optimizer is under way."""
        if self._running:
            raise UsageError(
                f"`{self._running}` of this optimizer is under way: await it first"
            )

    @asynccontextmanager
    async def _together(
        self, job: str, *, repairs: bool = False
    ) -> AsyncIterator[Group]:
        """Run a job with all ranks; if it fails here, it fails for all."""
        self.group.host.check_on_loop(f"ZeroRedundancyOptimizer.{job}")
        self._check_idle()
        if self._torn and not repairs:
            raise OptimizerError(
                f"the last `{self._torn}` did not end, so parameters may differ "
                "between ranks: `await optimizer.synchronize()` at every rank, or load "
                "a checkpoint"
            )
        self._running = job
        try:
            yield self._own.renew() if repairs else self._own.enter()
        except BaseException as error:
            self._is_met = False
            self._own.leave(reason_for(f"its `{job}`", error))
            raise
        finally:
            self._running = ""

    async def _meet(self, group: Group) -> None:
        """Compare parameters and options, if they have not been compared."""
        has_changed = self._shards.refresh()
        if self._is_met and not has_changed:
            return
        try:
            await verify(group, self._named(), self._described())
        except UsageError as error:
            raise UsageError(
                "a ZeroRedundancyOptimizer shares out the parameters of one module: "
                f"{error}"
            ) from error
        self._is_met = True

    def _named(self) -> dict[str, torch.Tensor]:
        named: dict[str, torch.Tensor] = {}
        for index, group in enumerate(self.param_groups):
            names = group.get("param_names") or [
                f"parameter {place} of group {index}"
                for place in range(len(group["params"]))
            ]
            named.update(zip(names, group["params"], strict=True))
        return named

    def _described(self) -> dict[str, object]:
        kind = type(self.optim)
        described: dict[str, object] = {
            "the optimizer": f"{kind.__module__}.{kind.__qualname__}",
            "what is called": self._running,
        }
        for index, group in enumerate(self.param_groups):
            for option in sorted(options_in(group)):
                if isinstance(group[option], _PLAIN):
                    described[f"{option} of group {index}"] = group[option]
        for name, parameter in self._named().items():
            if not parameter.requires_grad and is_sent(parameter):
                described[f"the gradient of {name}"] = "there, though it is frozen"
        return described

    # --- groups of parameters --------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters; at every rank, before the next step.

        Args:
            param_group: `params`, and options; the same at every rank.

        Raises:
            UsageError: a parameter is sparse, on `meta`, given twice, or on a device
                with `parameters_as_bucket_view`; a step is under way; `param_group` is
                not a group, or torch's optimizers refuse it.  Nothing has changed.
        """
        check_param_group(param_group)
        param_group = _listed(param_group)
        if not self._is_made:  # torch's constructor calls it
            super().add_param_group(param_group)
            return
        self._check_idle()
        with named("param_group"):
            super().add_param_group(param_group)
        added = self.param_groups[-1]
        before = list(self._partition.loads)
        try:
            self._owners.append(self._share(added["params"]))
            self.optim.add_param_group(self._part(-1))
        except BaseException:
            self.param_groups.pop()
            del self._owners[len(self.param_groups) :]
            self._partition.loads = before
            raise
        self._take_options()
        self._shards.add(added["params"], self._owners[-1])
        self._shards.refresh()
        self._is_met = False
        self._whole = None

    def _give_options(self) -> None:
        for own, whole in zip(self.optim.param_groups, self.param_groups, strict=True):
            own.update(options_in(whole))

    def _take_options(self) -> None:
        for own, whole in zip(self.optim.param_groups, self.param_groups, strict=True):
            whole.update(options_in(own))

    # --- state -----------------------------------------------------------------------

    @plain_steps
    async def consolidate_state_dict(self, to: int = 0) -> None:
        """Gather the states of all ranks at one rank; all ranks must call it.

        One share after the other is sent, so a rank holds at most its own and one
        other; but `to` holds all, until the next step.

        Args:
            to: the rank whose `state_dict` can be called then.

        Raises:
            UsageError: `to` is not a rank; the optimizer keeps a value that belongs to
                no parameter; ranks have other parameters or options than rank 0; or a
                step is under way.
            OptimizerError: a step has failed, see the class; or a rank's state has
                other values than tensors, numbers, strings and containers of these.
            CollectiveError: a rank failed; the call fails on all ranks that have not
                ended it.  No parameter and no state has changed.

        Cancellation:
            The call fails on all ranks that have not ended it.

        Source: torch's `ZeroRedundancyOptimizer.consolidate_state_dict`.
        """
        check_rank(to, "to", self.group.size)
        async with self._together("consolidate_state_dict") as group:
            await self._meet(group)
            self._whole = None
            self._give_options()
            state = await self._gather_states(group, to)
            if self.group.rank == to:
                self._whole = {
                    "state": {place: state[place] for place in sorted(state)},
                    "param_groups": with_places(self.param_groups),
                }

    async def _gather_states(self, group: Group, to: int) -> dict[int, Any]:
        """Return at `to` the state of all parameters, by place."""
        nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
        places, user = self._places(), user_of(group.host, self._shards.parameters)
        if group.rank == to:
            state = await in_thread(lambda: copied(self.optim, places), user)
            mine = nothing
        else:
            state = {}
            mine = await in_thread(lambda: to_bytes(self.optim, places), user)
        for rank in range(group.size):
            if rank == to:
                continue
            gathered = await group.gather(mine if rank == group.rank else nothing, to)
            if rank == group.rank:
                mine = nothing
            if gathered is not None:
                who = f"rank {rank} ({group.members[rank]!r})"
                came = gathered[rank]
                state |= await in_thread(
                    lambda came=came, who=who: from_bytes(came, who)  # type: ignore[misc]  # a default is how a lambda keeps a value
                )
        return state

    def _places(self) -> list[int]:
        """Return the positions of this rank's parameters among all."""
        owners = [owner for listed in self._owners for owner in listed]
        return [at for at, owner in enumerate(owners) if owner == self.group.rank]

    def state_dict(self) -> State:
        """Return the state of all ranks, in the form of the optimizer of one.

        torch's optimizer of the same class loads it, and so does this one, over any
        number of ranks.

        Returns:
            The state that `consolidate_state_dict` gathered here; tensors are copies.

        Raises:
            UsageError: the state is not here: it was gathered at another rank, or a
                step has been made since.

        Source: torch's `ZeroRedundancyOptimizer.state_dict`, which may return that of
        an earlier step.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        if self._whole is None:
            rank = self.group.rank
            raise UsageError(
                f"the whole state is not at rank {rank}: call `await "
                f"optimizer.consolidate_state_dict(to={rank})` at every rank after the "
                "last step"
            )
        whole: State = {
            "state": dict(self._whole["state"]),
            "param_groups": [dict(group) for group in self._whole["param_groups"]],
        }
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, whole)
            whole = whole if changed is None else changed
        return whole

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load this rank's share of a state; every rank loads the same.

        Parameters are not part of it: load those of the module, at every rank.  After
        that, an earlier failed step no longer matters.

        Args:
            state_dict: the result of `state_dict`, here or of torch's optimizer.  It is
                copied, and stays as it is.

        Raises:
            UsageError: `state_dict` has other groups of parameters, or is not a state;
                or a step is under way.  Nothing has changed.

        Source: torch's `ZeroRedundancyOptimizer.load_state_dict`.
        """
        self._check_idle()
        check_kind("state_dict", state_dict, Mapping, "what state_dict() returned")
        whole = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, whole)
            whole = whole if changed is None else changed
        sizes = [len(group["params"]) for group in self.param_groups]
        self.optim.load_state_dict(part_of(whole, sizes, self._places()))
        for own, group in zip(self.optim.param_groups, self.param_groups, strict=True):
            kept = {name: group[name] for name in group.keys() & OF_PARAMETERS}
            group.clear()
            group.update(options_in(own), **kept)
        self._torn = ""
        self._is_met = False
        self._whole = None
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    # --- the end ---------------------------------------------------------------------

    def close(self) -> None:
        """Let go of the group, on the event loop.  Idempotent.

        Parameters and state stay.
        """
        self._own.close()

    def __getstate__(self) -> NoReturn:
        """Refuse: a group cannot be saved.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            "a ZeroRedundancyOptimizer cannot be copied or pickled, as it belongs to a "
            "group: consolidate its state, and save its `state_dict()`"
        )


def _iterable(params: Params) -> Params:
    """Return parameters as torch takes them; refuse a value that is not iterable."""
    if isinstance(params, torch.Tensor):
        raise wrong("params", "a list of parameters, or of groups of them", params)
    return listed("params", params, "a list of parameters, or of groups of them")


def _check_class(optimizer_class: object) -> None:
    is_one = isinstance(optimizer_class, type) and issubclass(
        optimizer_class, torch.optim.Optimizer
    )
    if not is_one:
        wanted = "a subclass of torch.optim.Optimizer"
        raise wrong("optimizer_class", wanted, optimizer_class)


def _listed(group: dict[str, Any]) -> dict[str, Any]:
    """Return a group whose parameters are a list, and can be sent."""
    params = group["params"]
    if isinstance(params, torch.Tensor | set):  # torch knows what to do with these
        return group
    params = listed("params", params, "a list of parameters")
    seen: set[int] = set()
    for place, entry in enumerate(params):
        parameter = entry[1] if isinstance(entry, tuple) else entry
        if not isinstance(parameter, torch.Tensor):
            continue  # which torch refuses
        if parameter.layout is not torch.strided:
            raise UsageError(f"parameter {place} of a group is sparse; make it dense")
        if parameter.is_meta:
            raise UsageError(
                f"parameter {place} of a group is on 'meta', and has no values to step"
            )
        if id(parameter) in seen:
            raise UsageError(f"parameter {place} occurs twice in its group")
        seen.add(id(parameter))
    return {**group, "params": params}
