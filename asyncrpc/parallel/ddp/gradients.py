"""The gradients of a module: from its parameters into buckets, and back.

This module knows which parameters share a bucket, how often the gradient of each comes
in a pass, and where it lies; not how buckets are reduced.

Source: torch/csrc/distributed/c10d/reducer.cpp, whose division before the sum is kept,
so that the results are the same.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch

from asyncrpc.errors import UsageError
from asyncrpc.parallel.ddp.buckets import Buckets, bytes_for
from asyncrpc.parallel.ddp.machine import ParameterSpec, Readiness, assign
from asyncrpc.parallel.ddp.passes import Backward, PassConfig

_MIB: Final = 1 << 20
_OPTIMIZERS: Final = "_in_backward_optimizers"  # torch's attribute of a parameter
_OPTIMIZERS_HOME: Final = "torch.distributed.optim.apply_optimizer_in_backward"


class GradientOptions(NamedTuple):
    """Options of `DistributedDataParallel`; see there."""

    bucket_cap_mb: float
    first_bucket_cap_mb: float
    gradient_as_bucket_view: bool
    find_unused_parameters: bool
    static_graph: bool


class ParameterInfo(NamedTuple):
    """A parameter whose gradient is reduced."""

    name: str
    parameter: torch.nn.Parameter
    is_sparse: bool


class Gradients:
    """The gradients of one module: which ones a pass brings, and where they go.

    Attributes:
        learned: the parameters, by number.
        nbytes: bytes of memory that they need.
        is_ordered: whether the buckets follow the order in which gradients come.
    """

    def __init__(
        self, learned: Sequence[ParameterInfo], options: GradientOptions
    ) -> None:
        self.learned = learned
        self._options = options
        self._parameters = [entry.parameter for entry in learned]
        self._sparse = [entry.is_sparse for entry in learned]
        self._items: list[ParameterSpec] = []
        self._dtypes: list[torch.dtype] = []
        self.nbytes = 0
        self.numbers: list[list[int]] = []
        self._used_before: set[int] = set()
        self._buckets: Buckets | None = None
        self._have_views = False  # gradients may lie in the buckets
        self._stepping: list[torch.nn.Parameter] = []  # in the pass, by optimizers
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget all passes, as new ranks know none; let go of all gradients."""
        self._items = self._specs()
        self._dtypes = [parameter.dtype for parameter in self._parameters]
        self.nbytes = bytes_for(self._parameters, self._sparse)
        # Parameters that are used last get their gradients first.
        self.numbers = self._assign(reversed(range(len(self.learned))))
        self.is_ordered = False
        self._uses = [1] * len(self.learned)
        self._are_uses_known = not self._options.static_graph
        self._unused: frozenset[int] = frozenset()  # by any rank, in a static graph
        self.drop()

    def follow_dtypes(self) -> None:
        """Begin anew if parameters have other dtypes or devices than before."""
        if self._specs() != self._items:
            self.begin_anew()

    def _specs(self) -> list[ParameterSpec]:
        return [
            ParameterSpec(
                parameter.nbytes, (parameter.dtype, parameter.device), is_sparse
            )
            for _, parameter, is_sparse in self.learned
        ]

    @property
    def finds_unused(self) -> bool:
        """Return whether to search the graph for parameters that autograd misses."""
        return self._options.find_unused_parameters and not self._options.static_graph

    @property
    def asks_who_uses(self) -> bool:
        """Return whether a pass must find out which parameters are used."""
        if self._options.static_graph:
            return not self.is_ordered
        return self.finds_unused

    def text_of_missing(self, names: str) -> str:
        """Return the error text for gradients that have not come."""
        if self._options.static_graph:
            return _text_of_changed(names)
        return (
            f"the loss does not depend on {names}, which got no gradient in this "
            "backward pass; if that is intended, use find_unused_parameters=True"
        )

    def text_of_surplus(self, name: str) -> str:
        """Return the error text for a gradient that came more often than expected."""
        if self._options.static_graph:
            return _text_of_changed(name)
        return (
            f"the gradient of {name} came more often in one backward pass than it "
            "should (torch.utils.checkpoint with use_reentrant=True does that); use "
            "use_reentrant=False there, or static_graph=True and `await "
            "module.backward(loss)` here"
        )

    # --- buckets ---------------------------------------------------------------------

    def cut(self, memory: torch.Tensor) -> Buckets:
        """Return the buckets, in this memory: uint8, `(nbytes,)`."""
        if self._buckets is None:
            self._buckets = Buckets(
                self.numbers, self._parameters, self._dtypes, self._sparse, memory
            )
        return self._buckets

    def drop(self) -> None:
        """Let go of all gradients, and of the memory."""
        self._buckets = None
        self._have_views = False
        self._used_before.clear()
        for parameter in self._parameters:
            parameter.grad = None

    def drop_views(self) -> None:
        """Let go of the gradients that lie in buckets."""
        for number in self._in_buckets():
            self._parameters[number].grad = None

    def leave_buckets(self) -> bool:
        """Leave the memory of the buckets to gradients in it; return whether they may.

        A distributed pass does not add to them: they stay as they are.
        """
        had_views, self._have_views = self._have_views, False
        if had_views:
            self._buckets = None
        return had_views

    def readiness(self, buckets: Buckets) -> Readiness:
        """Return the readiness of a pass that begins."""
        return Readiness(buckets.numbers, self._uses, is_held=not self._are_uses_known)

    def _assign(self, order: Iterable[int]) -> list[list[int]]:
        return assign(
            self._items,
            list(order),
            first_cap_bytes=int(self._options.first_bucket_cap_mb * _MIB),
            cap_bytes=int(self._options.bucket_cap_mb * _MIB),
        )

    # --- in --------------------------------------------------------------------------

    def note_use(self, number: int) -> None:
        """Note that a pass which reduces nothing has added to a gradient."""
        if number in self._unused:
            raise UsageError(_text_of_changed(repr(self.learned[number].name)))
        self._used_before.add(number)

    def gathered(self) -> list[int]:
        """Return the parameters whose gradients were begun within `no_sync`."""
        return [
            number
            for number in self._used_before
            if self._parameters[number].grad is not None
        ]

    def is_lazy(self, number: int) -> bool:
        """Return whether a gradient is only computed when it is read."""
        return self._parameters[number].device.type == "xla"

    def fill_unused(self, current: Backward) -> None:
        """Fill in the gradients that never come."""
        for number, uses in enumerate(self._uses):
            if not uses:
                self.fill(current, number)

    def fill_zeros(self, current: Backward) -> None:
        """Fill in zeros for all."""
        for flat in current.buckets.flats:
            if flat is not None:
                flat.zero_()
        for number, (_, parameter, is_sparse) in enumerate(self.learned):
            if is_sparse:
                current.sparse[number] = _sparse_of(None, parameter, 1)

    def fill(self, current: Backward, number: int) -> None:
        """Put the gradient of a parameter into its bucket, or zeros without one."""
        name, parameter, is_sparse = self.learned[number]
        grad, scale = parameter.grad, current.terms.scale
        if is_sparse:
            current.sparse[number] = _sparse_of(grad, parameter, scale)
            return
        view = current.buckets.views[number]
        if parameter.dtype != view.dtype:
            raise UsageError(
                f"{name!r} has dtype {parameter.dtype} now, but had {view.dtype} when "
                "the ranks met: `await model.regroup(model.group)` at every rank"
            )
        with torch.no_grad():
            if grad is None:
                view.zero_()
            elif current.buckets.holds(number, grad):
                if scale != 1:
                    view.mul_(scale)
            elif grad.is_sparse:
                raise UsageError(
                    f"the gradient of {name!r} is sparse; only nn.Embedding and "
                    "nn.EmbeddingBag may have sparse gradients"
                )
            elif not grad.is_cpu:
                _fetch(grad, view, current.terms)
            else:
                if scale == 1:
                    view.copy_(grad)
                else:
                    torch.mul(grad, scale, out=view)
                if self._options.gradient_as_bucket_view:
                    parameter.grad = view

    # --- out -------------------------------------------------------------------------

    def take(self, current: Backward) -> None:
        """Give the reduced gradients to the parameters.

        Those of a distributed pass get memory of their own: several contexts may be
        open, and several passes add up in each.
        """
        unused = self.learn_unused(current)
        self._used_before.clear()
        self._have_views |= (
            self._options.gradient_as_bucket_view and current.part is None
        )
        with torch.no_grad():
            for bucket, numbers in enumerate(current.buckets.numbers):
                for number in numbers:
                    # A parameter that no rank has used keeps its gradient, if any.
                    if number not in unused:
                        self._take_one(current, bucket, number)

    def take_over_optimizers(self) -> None:
        """Step the optimizers that torch would step within backward passes.

        They would step as soon as this rank has its own gradient, before the mean.

        Source: torch.distributed.optim._apply_optimizer_in_backward.
        """
        stepping = [
            parameter
            for parameter in self._parameters
            if hasattr(parameter, _OPTIMIZERS)
        ]
        if len(stepping) > len(self._stepping):
            hooks: Any = sys.modules[_OPTIMIZERS_HOME]  # it has set the attribute
            for parameter in stepping:
                handles = hooks.param_to_optim_hook_handle_map
                for handle in handles.get(parameter, ()):
                    handle.remove()
            self._stepping = stepping

    def step(self) -> None:
        """Step the optimizers of a pass, which leave no gradients."""
        for parameter in self._stepping:
            for optimizer in getattr(parameter, _OPTIMIZERS):
                optimizer.step()
            parameter.grad = None

    def learn_unused(self, current: Backward) -> frozenset[int]:
        """Return the parameters that no rank has used: in a static graph, in any pass.

        So a rank that had no input in the first pass of a static graph learns them.
        """
        if current.used is None:
            return self._unused
        counts = current.used.tolist()
        unused = frozenset(number for number, count in enumerate(counts) if not count)
        if self._options.static_graph:
            self._unused = unused
        return unused

    def is_unused(self, number: int) -> bool:
        """Return whether no rank uses a parameter in any pass: the graph is static."""
        return number in self._unused

    def _take_one(self, current: Backward, bucket: int, number: int) -> None:
        parameter = self._parameters[number]
        if self._sparse[number]:
            parameter.grad = current.results[bucket]
            return
        is_view = current.buckets.holds(number, parameter.grad)
        if is_view and current.part is None:
            return
        stays = current.terms.is_alone and parameter.grad is not None
        if stays and not parameter.is_cpu:
            return  # the gradient is its own mean, and was not fetched
        view = current.buckets.views[number]
        as_view = self._options.gradient_as_bucket_view and current.part is None
        if as_view and parameter.is_cpu:
            parameter.grad = view
        elif parameter.grad is None or is_view:
            parameter.grad = view.clone().to(parameter.device)
        else:
            parameter.grad.copy_(view)

    def learn_uses(self, readiness: Readiness) -> None:
        """Assume that gradients come as often in each pass from now on."""
        if not self._are_uses_known:
            self._uses = list(readiness.counts)
            self._are_uses_known = True

    def learn_order(self, order: Sequence[int], memory: torch.Tensor) -> None:
        """Rebuild the buckets by the order in which gradients come."""
        self.is_ordered = True
        numbers = self._assign(order)
        if numbers == self.numbers:
            return
        # Other gradients get their places.
        moved = {number: grad.clone() for number, grad in self._in_buckets().items()}
        self.numbers = numbers
        self._buckets = None
        views = self.cut(memory).views
        for number, grad in moved.items():
            views[number].copy_(grad)
            self._parameters[number].grad = views[number]

    def _in_buckets(self) -> Mapping[int, torch.Tensor]:
        """Return the gradients that are views of buckets."""
        buckets = self._buckets
        return {
            number: parameter.grad
            for number, parameter in enumerate(self._parameters)
            if parameter.grad is not None
            and buckets is not None
            and buckets.holds(number, parameter.grad)
        }


def _text_of_changed(names: str) -> str:
    return (
        f"the graph is not static: {names} took part in this backward pass differently "
        "than in the first; use find_unused_parameters=True instead of "
        "static_graph=True"
    )


def _fetch(grad: torch.Tensor, view: torch.Tensor, terms: PassConfig) -> None:
    """Copy a gradient of a device into its bucket, unless this rank is alone.

    With one rank, ResNet50 on XLA was 5.7 % behind torch_xla's own step with this copy
    (102 MB there and back, each step), and is ahead without it.
    """
    if terms.is_alone:
        return
    view.copy_(grad)
    if terms.scale != 1:
        view.mul_(terms.scale)


def _sparse_of(
    grad: torch.Tensor | None, parameter: torch.nn.Parameter, scale: float
) -> torch.Tensor:
    """Return a sparse gradient with every element once, of its own memory."""
    if grad is None:
        grad = torch.sparse_coo_tensor(
            torch.empty((1, 0), dtype=torch.int64, device=parameter.device),
            parameter.new_empty((0, *parameter.shape[1:])),
            parameter.shape,
            check_invariants=True,
            device=parameter.device,
        )
    if not grad.is_sparse:
        raise UsageError(
            "a module with sparse=True has a dense gradient: do not use its weight "
            "elsewhere, or leave out sparse=True"
        )
    return (grad.detach() * scale).coalesce()
