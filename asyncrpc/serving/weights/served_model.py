"""A model whose weights are exchanged while it serves, completely or not at all.

Each version is a separate module with its own tensors.  A batch takes the version that
is served when it begins, and keeps it to its end; the next batch may get another.  So
no batch waits for new weights, and none sees a mixture: tensors that a batch may read
are never written to.  The price is memory: the previous version is kept for a rollback,
and while new weights arrive there is a third.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

import torch
from torch import nn

from asyncrpc.core.arguments import check_count, check_kind
from asyncrpc.core.calls.context import current_call_var
from asyncrpc.errors import RejectedError, UsageError
from asyncrpc.serving.weights.machine.versions import TransferId, VersionHistory
from asyncrpc.serving.weights.messages import TensorHead, VersionReport

M = TypeVar("M", bound=nn.Module)

VERSION_MAX: Final = 2**63 - 1
_SHOWN_MAX: Final = 3  # differences in an error


@dataclass(frozen=True, slots=True)
class ServedVersion(Generic[M]):
    """One version of a model.

    Attributes:
        model: the module; do not change it.
        number: of the version.
    """

    model: M
    number: int


class WeightStore(Generic[M]):
    """The versions of one model, and the new weights that are under way.

    Attributes:
        canary: share of the calls that canaries get; 0: this is not one.
        on_changed: called when the version or the canary share has changed.
    """

    def __init__(self, model: M, version: int, keep: int) -> None:
        self.current = ServedVersion(model, version)
        self.canary = 0.0
        self.history = VersionHistory(version, keep)
        self.on_changed: Callable[[], object] | None = None
        self._kept: dict[int, ServedVersion[M]] = {}
        self._next: ServedVersion[M] | None = None
        self._staging: dict[str, torch.Tensor] = {}

    @property
    def report(self) -> VersionReport:
        """The report for publishers."""
        return VersionReport(self.current.number, list(self.history.kept), self.canary)

    def state(self) -> dict[str, torch.Tensor]:
        """The tensors of the served version; for reading only."""
        return dict(self.current.model.state_dict())

    def begin(
        self, transfer: TransferId, version: int, heads: Sequence[TensorHead]
    ) -> None:
        """Make room for new weights."""
        check_fit(self.state(), heads)
        names = [head.name for head in heads]
        self.history.begin(transfer, version, names)
        self._next, self._staging = None, {}

    def room_for(self) -> dict[str, torch.Tensor]:
        """Make the tensors that new weights are copied into; called in a thread."""
        model = self.current.model
        copies: dict[int, torch.Tensor] = {}  # tied tensors stay tied
        room = {}
        for name, old in model.state_dict(keep_vars=True).items():
            if id(old) not in copies:
                copies[id(old)] = torch.empty_like(old.detach())
            room[name] = copies[id(old)]
        return room

    def set_room(self, transfer: TransferId, room: dict[str, torch.Tensor]) -> None:
        """Keep the new tensors, unless the transfer was given up meanwhile."""
        if self.history.transfer == transfer:
            self._staging = room

    @property
    def room(self) -> Mapping[str, torch.Tensor]:
        """The tensors that new weights are copied into."""
        return self._staging

    def with_room(self) -> M:
        """Return the module with its new tensors; called in a thread."""
        model, room = self.current.model, self._staging
        memo: dict[int, object] = {}
        for name, old in model.state_dict(keep_vars=True).items():
            new = room[name]
            if isinstance(old, nn.Parameter):
                new = nn.Parameter(new, requires_grad=old.requires_grad)
            memo.setdefault(id(old), new)
        try:
            return copy.deepcopy(model, memo)
        except Exception as error:
            raise UsageError(
                f"the model cannot be copied for new weights: {error}; keep objects"
                " that cannot be copied outside of the module"
            ) from error

    def set_next(self, model: M) -> None:
        """Take the module with the complete new weights."""
        self._next = ServedVersion(model, self.history.staged)

    def commit(self, transfer: TransferId, canary: float) -> None:
        """Serve the new weights, from the next batch on."""
        if self._next is None:
            raise RejectedError("the new weights are not complete")
        dropped = self.history.commit(transfer)
        self._kept[self.current.number] = self.current
        self._kept.pop(dropped, None)
        self.current = self._next
        self.canary = canary
        self.drop()

    def roll_back(self, version: int) -> None:
        """Serve the previous version again."""
        if self.history.roll_back(version):
            self.current = self._kept.pop(self.history.served)
            self.canary = 0.0
            self.drop()

    def set_canary(self, version: int, share: float) -> None:
        """Set the share of the calls that canaries get."""
        if version == self.current.number and share != self.canary:
            self.canary = share
            self._tell_changed()

    def drop(self) -> None:
        """Drop the references to new weights that are served or given up."""
        self._next, self._staging = None, {}
        self._tell_changed()

    def _tell_changed(self) -> None:
        if self.on_changed is not None:
            self.on_changed()


class ServedModel(Generic[M]):
    """A model, in the version that is served now.

    Attributes:
        weights: its versions, for the service that brings new ones.

    Example:
        >>> served = serving.ServedModel(net)
        >>> async def predict(row: torch.Tensor) -> torch.Tensor:
        ...     with served.batch() as current:
        ...         return current.model(row)
        >>> async with Worker("model-0") as worker, serving.Replica(model=served):
        ...     await told_to_end.wait()
    """

    def __init__(self, model: M, *, version: int = 0, keep: int = 1) -> None:
        """Serve a module.

        Args:
            model: has the first weights, on the device where it is to run.  It is
                copied for each further version; its parameters and buffers are not.
            version: of its weights.
            keep: how many previous versions are kept for a rollback; each takes the
                memory of the model.

        Raises:
            UsageError: an argument has the wrong type.
        """
        check_kind("model", model, nn.Module, "a torch.nn.Module")
        check_count("version", version, at_most=VERSION_MAX)
        check_count("keep", keep)
        self.weights = WeightStore(model, version, keep)

    @contextmanager
    def batch(self) -> Iterator[ServedVersion[M]]:
        """Return a context with the current version, which stays the same within it.

        If a call runs here, its answer tells the version: see `tell`.

        Thread safety: from any thread.
        """
        current = self.weights.current
        self.tell(current.number)
        yield current

    def tell(self, version: int) -> None:
        """Tell the caller which version made the answer of the running call.

        It is for functions that get their answers from a batch; outside of calls it
        does nothing.

        Args:
            version: from the `ServedVersion` of the batch.

        Raises:
            UsageError: `version` is not the number of a version.

        Thread safety: from any thread that runs a function for a call.

        Example:
            >>> async def predict(row: torch.Tensor) -> torch.Tensor:
            ...     answer, version = await batched(row)
            ...     served.tell(version)
            ...     return answer
        """
        check_count("version", version, at_most=VERSION_MAX)
        call = current_call_var.get()
        if call is not None:
            call.note = version

    @property
    def version(self) -> int:
        """The version that is served now."""
        return self.weights.current.number

    @property
    def canary(self) -> float:
        """Share of the calls that canaries get, if this model is a canary; else 0."""
        return self.weights.canary


def check_fit(state: Mapping[str, torch.Tensor], heads: Sequence[TensorHead]) -> None:
    """Refuse weights that do not fit a model."""
    announced = {head.name: head for head in heads}
    problems = [f"{name!r} is missing" for name in state if name not in announced]
    problems += [f"{name!r} is not in it" for name in announced if name not in state]
    for name, head in announced.items():
        mine = state.get(name)
        if mine is None:
            continue
        if list(mine.shape) != list(head.shape):
            problems.append(
                f"{name!r} has shape {list(head.shape)}, not {list(mine.shape)}"
            )
        theirs = getattr(torch, head.dtype, None)
        if not isinstance(theirs, torch.dtype) or not _converts(theirs, mine.dtype):
            problems.append(f"{name!r} is of {head.dtype}, not {mine.dtype}")
    if not heads:
        problems.append("there are none")
    if len(announced) != len(heads):
        problems.append("a name comes twice")
    if problems:
        more = len(problems) - _SHOWN_MAX
        shown = "; ".join(problems[:_SHOWN_MAX])
        rest = f"; and {more} more" if more > 0 else ""
        raise UsageError(f"these weights do not fit the model: {shown}{rest}")


def _converts(source: torch.dtype, target: torch.dtype) -> bool:
    """Return whether a dtype may be converted: only between floating-point types."""
    return source == target or (source.is_floating_point and target.is_floating_point)
