"""`DistributedDataParallel`: a module that stays the same at every rank.

Source: torch.nn.parallel.DistributedDataParallel.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from typing import Any, Final, NamedTuple, NoReturn, Self, TypeVar

import torch
from torch import nn

from asyncrpc.core.arguments import (
    check_above,
    check_callable,
    check_flag,
    check_flags,
    check_kind,
    check_sequence,
    listed,
)
from asyncrpc.core.torch_modes import modes_here, plain_steps, surrounded
from asyncrpc.errors import UsageError
from asyncrpc.parallel.collectives.group import Group
from asyncrpc.parallel.ddp.argument_checks import check_group, check_roots
from asyncrpc.parallel.ddp.buffers import Buffers, tensors_of
from asyncrpc.parallel.ddp.exchange import Exchange, Hook
from asyncrpc.parallel.ddp.gradients import GradientOptions, Gradients, ParameterInfo
from asyncrpc.parallel.ddp.initial import broadcast, verify
from asyncrpc.parallel.ddp.joining import Join, Joinable
from asyncrpc.parallel.ddp.reducer import Reducer

Loss = TypeVar("Loss", bound=torch.Tensor | Sequence[torch.Tensor])

BUCKET_CAP_MB: Final = 25.0  # MiB, as torch's
FIRST_BUCKET_CAP_MB: Final = 1.0


class DDPStatistics(NamedTuple):
    """What was reduced for a module at this rank.

    Attributes:
        passes: backward passes that have ended well.
        buckets: how many there are.
        bucket_bytes: of each.
        communication_s: seconds in which buckets were sent or received, or waited for
            other ranks.
        waited_s: seconds for which backward passes had nothing to do but wait.
    """

    passes: int
    buckets: int
    bucket_bytes: tuple[int, ...]
    communication_s: float
    waited_s: float

    @property
    def hidden(self) -> float:
        """The share of communication that took place while autograd ran: 0 to 1."""
        if not self.communication_s:
            return 0.0
        return max(0.0, 1 - self.waited_s / self.communication_s)


class DistributedDataParallel(nn.Module):
    """A module whose gradients are averaged over all ranks.

    Await it once, at every rank: the modules are compared, and then get the parameters
    and buffers of rank 0.  Then train it with `await model.backward(loss)` in the place
    of `loss.backward()`: gradients are reduced while autograd runs, in buckets.

    `loss.backward()` works too, in a thread that is not the event loop's, and waits at
    its end.

    A backward pass that fails leaves no gradients (`.grad` is None) and fails at every
    rank that has not ended it; the next one may go well, unless a rank is lost.

    Attributes:
        module: as given.
        group: as given.

    Example:
        >>> model = await DistributedDataParallel(nn.Linear(8, 2), group)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> await model.backward(model(inputs).square().mean())
        >>> optimizer.step()

    Source: torch.nn.parallel.DistributedDataParallel; unlike there, gradients are views
    of buckets unless that is turned off, buffers are broadcast after a backward pass,
    not before a forward pass, and a parameter without a gradient is an error of that
    pass, not of the next one.
    """

    def __init__(
        self,
        module: nn.Module,
        group: Group,
        *,
        broadcast_buffers: bool = True,
        init_sync: bool = True,
        bucket_cap_mb: float = BUCKET_CAP_MB,
        first_bucket_cap_mb: float = FIRST_BUCKET_CAP_MB,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
        ignored: Collection[str] = (),
    ) -> None:
        """Wrap the module; nothing is sent before the module is awaited.

        Args:
            module: the same at every rank, on any device.  Gradients on a device are
                reduced in host memory, where hooks get them.
            group: the ranks; the module gets a group of its own, so that its
                collectives do not interfere with yours.
            broadcast_buffers: after each backward pass all ranks take the buffers
                (running means, say) of rank 0.
            init_sync: when the module is awaited, compare it with the others, and take
                parameters and buffers of rank 0.
            bucket_cap_mb: size of a bucket, in MiB: one is reduced when it is full.
            first_bucket_cap_mb: size of the first, in MiB; small, so that reducing
                begins early.
            find_unused_parameters: a pass may leave parameters out, different ones at
                each rank; parameters that no rank uses keep their gradient.
            gradient_as_bucket_view: gradients lie in the buckets, so none is copied
                back; `grad.detach_()` cannot be used then.  If it is off, or on a
                device, each gradient has memory of its own, the same in each pass.
            static_graph: every pass uses the same parameters in the same way as the
                first; then parameters may be unused, or used in several reentrant
                checkpoints.
            ignored: names of parameters and buffers to leave alone.

        Raises:
            UsageError: no parameter needs a gradient, a size is not positive, a name is
                unknown, a parameter has no values, or an argument has the wrong type.
        """
        super().__init__()
        check_kind("module", module, nn.Module, "a torch.nn.Module")
        check_group(group)
        check_above("bucket_cap_mb", bucket_cap_mb, 0)
        check_above("first_bucket_cap_mb", first_bucket_cap_mb, 0)
        check_flags(
            broadcast_buffers=broadcast_buffers,
            init_sync=init_sync,
            find_unused_parameters=find_unused_parameters,
            gradient_as_bucket_view=gradient_as_bucket_view,
            static_graph=static_graph,
        )
        ignored = listed("ignored", ignored, "a list of names")
        self.module = module
        self.group = group
        self._init_sync = init_sync
        self._options = GradientOptions(
            bucket_cap_mb,
            first_bucket_cap_mb,
            gradient_as_bucket_view,
            find_unused_parameters,
            static_graph,
        )
        parameters, buffers = tensors_of(module, ignored)
        self._ignored = frozenset(ignored)  # names, as has been checked
        gradients = Gradients(_learned(module, parameters), self._options)
        self._gradients = gradients
        is_sending = broadcast_buffers and buffers
        self._sent_buffers = Buffers(module, self._ignored) if is_sending else None
        self._reducer = Reducer(gradients, self._exchange_over(group))
        kept = self._ignored if is_sending else self._ignored | set(buffers)
        # No reference to this object: it must end with the last one of the program's,
        # as its hooks do, and not some time later at each rank.
        alike = functools.partial(_tensors_of, module, kept)
        self._joinable = Joinable(reducer=self._reducer, state=alike)
        self._is_ready = False

    def _exchange_over(self, group: Group) -> Exchange:
        gradients = self._gradients
        parameters = [entry.parameter for entry in gradients.learned]
        return Exchange(group, parameters, self._sent_buffers, gradients.nbytes)

    def __await__(self) -> Generator[Any, None, Self]:
        """Meet the other ranks; return this module."""
        return self._meet().__await__()

    @plain_steps
    async def _meet(self) -> Self:
        exchange = self._reducer.exchange
        if not self._is_ready:
            self._follow_dtypes(exchange)
        if self._init_sync and not self._is_ready:
            tensors = _tensors_of(self.module, self._ignored)
            await verify(exchange.group, tensors, self._options._asdict())
            await broadcast(exchange.group, list(tensors.values()), 0)
        if not self._is_ready:
            await exchange.enter()
            self._is_ready = True
            self._reducer.is_syncing = True
        return self

    def _follow_dtypes(self, exchange: Exchange) -> None:
        self._gradients.follow_dtypes()
        exchange.nbytes = self._gradients.nbytes

    @plain_steps
    async def regroup(self, group: Group) -> None:
        """Go on with other ranks, such as the next generation of an elastic group.

        Every rank of `group` calls it, with the same parameters and buffers: see
        `broadcast_state`.  A newcomer may make its module with that group first, and
        also calls this, in place of awaiting the module.  Gradients are dropped, and
        reduced in buckets for the new ranks from now on; hooks stay, with their states.

        Args:
            group: the ranks from now on.

        Raises:
            UsageError: a backward pass is running, `group` is not a Group, or this is
                not the worker's event loop.
            CollectiveError: the ranks could not meet; the call may be repeated.

        Cancellation:
            The module has no ranks: call it again.
        """
        check_group(group)
        group.host.check_on_loop("DistributedDataParallel.regroup")
        self._reducer.check_idle()
        self._is_ready = False
        if group is not self.group:
            former = self._reducer.exchange
            self._reducer.exchange = exchange = self._exchange_over(group)
            self.group = group
            former.hand_hook_to(exchange)
            former.close()
        self._gradients.begin_anew()
        self._reducer.exchange.nbytes = self._gradients.nbytes
        await self._reducer.exchange.enter()
        self._is_ready = self._reducer.is_syncing = True

    # --- use -------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on this rank's inputs; nothing is sent.

        Raises:
            UsageError: the module has not been awaited.
        """
        self._check_ready()
        if not self._reducer.passes:
            self._gradients.take_over_optimizers()
        if self._sent_buffers is not None:
            self._sent_buffers.put_late()
        output = self.module(*args, **kwargs)
        self._reducer.watch(output)
        return output

    async def backward(
        self,
        loss: Loss | Callable[[], Loss],
        gradient: torch.Tensor | Sequence[torch.Tensor] | None = None,
        *,
        retain_graph: bool = False,
    ) -> Loss:
        """Compute the gradients of a loss, and reduce them over all ranks meanwhile.

        Autograd runs in a thread: the event loop goes on.  Afterwards `.grad` of each
        parameter has grown by the mean of its gradients at all ranks.

        Args:
            loss: the tensor to begin at: a scalar, or with `gradient` any shape; or
                several tensors.  Or a function that computes it, which is called in
                that thread first, under torch's modes of the caller (autocast, say).
                So forward and backward pass run under one lock of an exclusive device,
                and are one graph on XLA devices.
            gradient: of each loss, in its shape; None: 1.
            retain_graph: keep the graph for another pass.

        Returns:
            The loss, as it was given or computed.

        Raises:
            UsageError: a parameter got no gradient, or several; another pass is
                running; the module has not been awaited; an argument is wrong; or this
                is not the worker's event loop.
            CollectiveError: the gradients could not be reduced; `.grad` is not set.
            Exception: the function's own error; the other ranks get a CollectiveError.

        Cancellation:
            The pass is given up, for all ranks, and there are no gradients.  It ends
            when autograd reaches the next parameter.

        Source: torch.autograd.backward.
        """
        self._check_ready()
        check_flag("retain_graph", retain_graph)
        if not callable(loss):
            check_roots(loss, gradient)
        elif gradient is not None and not isinstance(gradient, torch.Tensor):
            check_sequence("gradient", gradient, "a tensor, or a list of tensors")
        self.group.host.check_on_loop("DistributedDataParallel.backward")
        losses: list[Loss] = []
        context = contextvars.copy_context()
        compute = surrounded(loss, modes_here()) if callable(loss) else None

        def roots_of() -> Sequence[torch.Tensor]:
            its: Any = loss if compute is None else context.run(compute)
            roots = check_roots(its, gradient)
            losses.append(its)
            return roots

        def engine() -> None:
            torch.autograd.backward(losses[0], gradient, retain_graph=retain_graph)

        await self._reducer.backward(roots_of, engine)
        return losses[0]

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a context in which backward passes only add to this rank's gradients.

        The first pass after it reduces the sum.  Both forward and backward pass belong
        into the context.

        Source: torch.nn.parallel.DistributedDataParallel.no_sync.
        """
        reducer = self._reducer
        before, reducer.is_syncing = reducer.is_syncing, False
        try:
            yield
        finally:
            reducer.is_syncing = before

    def join(
        self,
        *,
        divide_by_initial_world_size: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Return an async context for a loop whose length differs between ranks.

        A rank that reaches the end takes part with zeros in the backward passes of the
        others, until all have reached it; then all get the parameters and buffers of a
        rank that was there to the last.  Every rank must use it.  If the steps of the
        optimizer wait for other ranks, use `Join([model, optimizer])`.

        Args:
            divide_by_initial_world_size: the mean is over all ranks; else over the
                ranks that have inputs.
            throw_on_early_termination: the first rank without inputs ends the loop for
                all, with an error.

        Raises:
            UsageError: the module has not been awaited, or an argument is not a bool.

        Example:
            >>> async with model.join():
            ...     for inputs in my_batches:
            ...         await model.backward(model(inputs).mean())
            ...         optimizer.step()

        Source: torch.nn.parallel.DistributedDataParallel.join.
        """
        self._check_ready()
        return Join(
            [self],
            divide_by_initial_world_size=divide_by_initial_world_size,
            throw_on_early_termination=throw_on_early_termination,
        )

    def register_comm_hook(self, state: object, hook: Hook) -> None:
        """Let a hook reduce the buckets, instead of a mean over all ranks.

        Args:
            state: the hook's first argument; None: the group of this module, which a
                `HookState` also gets, or for a hook of torch's own its default group.
            hook: `async def hook(state, bucket) -> Tensor`, called on the event loop
                for one bucket after the other; it returns the gradients,
                `(elements,)`.  Or one that returns a torch.futures.Future, such as
                those of torch.distributed.algorithms.ddp_comm_hooks: it is called in a
                thread.

        Raises:
            UsageError: the module has a hook already, or a sparse gradient, which hooks
                cannot reduce; or `hook` cannot be called.

        Source: torch.nn.parallel.DistributedDataParallel.register_comm_hook.
        """
        check_callable("hook", hook)
        exchange = self._reducer.exchange
        if exchange.hook is not None:
            raise UsageError(
                f"this module already has the communication hook {exchange.hook!r}; "
                "a module can have only one"
            )
        if any(entry.is_sparse for entry in self._gradients.learned):
            raise UsageError(
                "a communication hook cannot reduce sparse gradients: use nn.Embedding "
                "with sparse=False"
            )
        exchange.set_hook(state, hook)

    def statistics(self) -> DDPStatistics:
        """Return what has been reduced so far at this rank."""
        reducer, learned = self._reducer, self._gradients.learned
        sizes = tuple(
            sum(learned[number].parameter.nbytes for number in bucket)
            for bucket in self._gradients.numbers
        )
        return DDPStatistics(
            reducer.passes,
            len(sizes),
            sizes,
            reducer.communication_s,
            reducer.waited_s,
        )

    def close(self) -> None:
        """Let go of the module, which is unchanged, and of its group.  Idempotent.

        Called on the event loop.  Gradients that lie in buckets stay as they are.
        """
        self._reducer.close()
        self._reducer.exchange.close()
        self._is_ready = False

    def __getstate__(self) -> NoReturn:
        """Refuse: a group cannot be saved.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            "a DistributedDataParallel cannot be copied or pickled, as it belongs to a "
            "group: save `model.module.state_dict()`, and wrap the module again"
        )

    def _check_ready(self) -> None:
        if not self._is_ready:
            raise UsageError(
                "await the module first, at every rank: `model = await "
                "DistributedDataParallel(module, group)`"
            )


def _tensors_of(module: nn.Module, ignored: Collection[str]) -> dict[str, torch.Tensor]:
    """Return what all ranks have alike: a buffer may have been assigned anew."""
    parameters, buffers = tensors_of(module, ignored)
    return {**parameters, **buffers}


def _learned(
    module: nn.Module, parameters: dict[str, nn.Parameter]
) -> Sequence[ParameterInfo]:
    """Return the parameters that need gradients."""
    sparse = {
        id(layer.weight)
        for layer in module.modules()
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse
    }
    learned = [
        ParameterInfo(name, parameter, id(parameter) in sparse)
        for name, parameter in parameters.items()
        if parameter.requires_grad
    ]
    if not learned:
        raise UsageError(
            "no parameter of the module needs a gradient, so there is nothing to "
            "reduce: use the module itself"
        )
    return learned
