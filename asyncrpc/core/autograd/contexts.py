"""The autograd contexts of one worker, open ones and ended ones."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from typing import Final

from asyncrpc.core.autograd.messages import ReleaseContext
from asyncrpc.core.autograd.state import ContextState
from asyncrpc.core.ids import ContextId, Incarnation, WorkerId
from asyncrpc.core.links.directory import Directory
from asyncrpc.core.services.ports import PeerLink
from asyncrpc.errors import InvalidContextError

# What a context takes, or something noted in one, besides its graph, as measured.
RECORD_BYTES: Final = 4 << 10
# Contexts that have ended, so that a late message does not revive one.
ENDED_MAX: Final = 4096


class Contexts:
    """The contexts of one worker.

    Attributes:
        open: the states of contexts that are open here.
    """

    def __init__(
        self,
        me: WorkerId,
        directory: Directory,
        state_class: type[ContextState] = ContextState,
    ) -> None:
        self.open: dict[ContextId, ContextState] = {}
        self.on_released: Callable[[ContextId], None] = _do_nothing
        self._me = me
        self._directory = directory
        self._state_class = state_class
        # Each with whether its creator has said so, or another worker.
        self._ended: OrderedDict[ContextId, bool] = OrderedDict()
        self._serial = 0
        self._kept: Counter[Incarnation] = Counter()

    def next_serial(self) -> int:
        """Return a number that no context, pass or message of this worker has yet."""
        self._serial += 1
        return self._serial

    def has_ended(self, context_id: ContextId) -> bool:
        """Return whether a context has ended, as far as is remembered."""
        return context_id in self._ended

    def reopen(self, context_id: ContextId) -> bool:
        """Return whether a context that others ended goes on for its creator."""
        if self._ended.get(context_id, True):
            return False
        del self._ended[context_id]
        return True

    def enter(self, context_id: ContextId, creator: WorkerId) -> ContextState:
        """Return a context's state, made if it is new here.

        Args:
            creator: the worker that opened it; its name may not be known yet.
        """
        state = self.open.get(context_id)
        if state is None:
            if context_id in self._ended:
                raise InvalidContextError(f"autograd context {context_id} has ended")
            state = self.open[context_id] = self._state_class(context_id, creator)
        elif creator.name and not state.creator.name:
            state.creator = creator
        return state

    def keep(self, state: ContextState, link: PeerLink) -> None:
        """Count something that a worker brings, until the context ends."""
        link.check_room(RECORD_BYTES)
        state.kept_for[link.peer.incarnation] += 1
        self._kept[link.peer.incarnation] += 1

    def held_for(self, peer: Incarnation) -> int:
        """Return how many bytes that takes which a worker has brought."""
        return RECORD_BYTES * self._kept[peer]

    def state(self, context_id: ContextId) -> ContextState:
        """Return the state of a context that is open."""
        state = self.open.get(context_id)
        if state is None:
            raise InvalidContextError(
                f"autograd context {context_id} is not open on worker "
                f"{self._me.name!r}: it has ended, or no call brought it here"
            )
        return state

    def release(self, context_id: ContextId, reporter: int = 0) -> None:
        """End a context here, and on every worker that it went on to.

        Args:
            reporter: the worker that reported the end, and knows it already; 0: the end
                is known here first.
        """
        state = self.open.pop(context_id, None)
        if state is None:
            return
        self.on_released(context_id)
        for peer, count in state.kept_for.items():
            self._kept[peer] -= count
            if not self._kept[peer]:
                del self._kept[peer]
        self._ended[context_id] = reporter in (0, context_id.creator)
        if len(self._ended) > ENDED_MAX:
            self._ended.popitem(last=False)
        for pass_id in list(state.passes):
            backward_pass = state.end_pass(pass_id, commit=False)
            if backward_pass is not None:
                backward_pass.abort("the autograd context was left")
        self._tell(state.peers, context_id, {reporter, context_id.creator})

    def _tell(
        self, peers: Iterable[WorkerId], context_id: ContextId, knowing: set[int]
    ) -> None:
        for peer in peers:
            if peer.incarnation not in knowing:
                link = self._directory.link_of(peer.incarnation)
                if link is not None:
                    link.tell(ReleaseContext(context_id))

    def close(self) -> None:
        """Drop every graph, and fail the tasks that wait here for a pass."""
        for state in self.open.values():
            for pass_id in list(state.passes):
                backward_pass = state.end_pass(pass_id, commit=False)
                # Requests of passes that other workers began are cancelled elsewhere.
                if backward_pass is not None and pass_id[0] == self._me.incarnation:
                    backward_pass.abort("the worker was shut down")
        self.open.clear()


def _do_nothing(_context_id: ContextId) -> None:
    """Do nothing when a context ends."""
