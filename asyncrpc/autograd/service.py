"""Distributed autograd of one worker: records crossings, runs backward passes.

A pass has two phases.

1.  *Discovery.*  From the roots, each worker walks its own graph, finds which received
    tensors take part and asks their senders to do the same (`discover`).  A request is
    answered when all that follows from it is, so the answer to the first one says that
    discovery is over; with it come the pairs of workers that gradients will go between.
2.  *Gradients.*  Each crossing that takes part gets exactly one gradient (`gradients`),
    the others get nothing: an unused result costs nothing, and nothing waits for it.

Gradients gather in the pass and enter the context when the whole pass has succeeded
(`commit`); a failure anywhere drops them everywhere (`abort`).

Source: pytorch/pytorch#23110 describes the exact ("SMART") mode and its difficulty;
termination is by acknowledgement (Dijkstra and Scholten, 1980).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

import torch

from asyncrpc.autograd.context import (
    Context,
    ContextState,
    Pass,
    current_context_var,
)
from asyncrpc.autograd.engine import Engine, reach_of
from asyncrpc.autograd.functions import CrossingId, Received, Recv, edge_of
from asyncrpc.autograd.machine import Mode, workers_in_cycles
from asyncrpc.errors import (
    AutogradError,
    BackwardFailedError,
    CallError,
    InvalidContextError,
    MalformedError,
    NoGradientPathError,
    RemoteError,
    UsageError,
)
from asyncrpc.ids import ContextId, Incarnation, MessageId, WorkerId
from asyncrpc.runtime.extensions import OnGradient
from asyncrpc.runtime.links.link import Link
from asyncrpc.runtime.worker import Worker

T = TypeVar("T")
SERVICE: Final = "autograd"
# Contexts that have ended, so that a late message does not revive one.
ENDED_MAX: Final = 4096
Edges = set[tuple[int, int]]


class AutogradService:
    """A `runtime.extensions.Propagator` and `Service`."""

    name = SERVICE
    key = "a"

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.engine = Engine()
        self._contexts: dict[ContextId, ContextState] = {}
        self._ended: deque[ContextId] = deque(maxlen=ENDED_MAX)
        self._serial = 0
        self._handlers: dict[str, Callable[..., Coroutine[Any, Any, Any]]] = {
            "discover": self._on_discover,
            "gradients": self._on_gradients,
        }

    # --- contexts --------------------------------------------------------------------

    def new_context(self) -> Context:
        """Make a context; `async with` opens it."""
        return Context(self, ContextId(self.worker.incarnation, self._next()))

    def context_of(self, context_id: Sequence[int]) -> Context:
        """Return a handle of a context that another worker opened."""
        creator, serial = context_id
        return Context(self, ContextId(Incarnation(creator), serial))

    def open(self, context_id: ContextId) -> ContextState:
        """Return a context's state, made if it is new here.

        Raises:
            InvalidContextError: it has ended.
        """
        state = self._contexts.get(context_id)
        if state is None:
            if context_id in self._ended:
                raise InvalidContextError(f"autograd context {context_id} has ended")
            state = self._contexts[context_id] = ContextState()
        return state

    def release(self, context_id: ContextId) -> None:
        """End a context here, and on every worker that it went on to."""
        state = self._contexts.pop(context_id, None)
        if state is None:
            return
        self._ended.append(context_id)
        for pass_id in list(state.passes):
            one = state.end_pass(pass_id)
            if one is not None:
                _abort(one, "the autograd context was left")
        for peer in state.peers:
            link = self.worker.directory.link_of(peer.incarnation)
            if link is not None:
                link.notify(SERVICE, "release", list(context_id))

    def state(self, context: Context | ContextId) -> ContextState:
        """Return the state of a context that is open.

        Raises:
            InvalidContextError: it is not, or never came here.
        """
        context_id = context.id if isinstance(context, Context) else context
        state = self._contexts.get(context_id)
        if state is None:
            raise InvalidContextError(
                f"autograd context {context_id} is not open on worker "
                f"{self.worker.name!r}: it has ended, or no call brought it here"
            )
        return state

    async def gathered(self, context_id: ContextId) -> dict[torch.Tensor, torch.Tensor]:
        """Return the gradients here of a context; none if it never came here.

        Passes that run here are waited for: when `backward` returns at the worker that
        started it, its commit may still be on the way to this one.

        Raises:
            InvalidContextError: the context has ended.
        """
        state = self._contexts.get(context_id)
        if state is not None:
            await state.settled()
        if context_id in self._ended:
            raise InvalidContextError(
                f"autograd context {context_id} has ended on worker "
                f"{self.worker.name!r}"
            )
        return {} if state is None else state.gradients

    @property
    def open_contexts(self) -> int:
        """How many contexts this worker knows of."""
        return len(self._contexts)

    # --- the forward pass: crossings (Propagator) ------------------------------------

    def outgoing(self, link: Link, tensors: list[torch.Tensor]) -> Any:
        """Record what a message takes out of this worker's graph."""
        context = current_context_var.get()
        if context is None or context.id not in self._contexts:
            return None
        state = self._contexts[context.id]
        state.peers.add(link.peer)
        if not tensors:
            return [*context.id, 0]
        message = MessageId(self.worker.incarnation, self._next())
        state.sent[message] = [edge_of(tensor) for tensor in tensors]
        return [*context.id, message.serial]

    def incoming(self, link: Link, meta: Any) -> OnGradient | None:
        """Join the context of a message; return what its tensors go through."""
        context_id, serial = _read_meta(meta)
        if context_id in self._ended:
            return None
        state = self.open(context_id)
        state.peers.add(link.peer)
        if not serial:
            return None
        message = MessageId(link.peer.incarnation, serial)
        received = state.received[message] = []

        def receive(tensor: torch.Tensor) -> torch.Tensor:
            crossing = CrossingId(message, len(received))
            one = Received(crossing, link.peer)
            received.append(one)
            with torch.enable_grad():
                result: torch.Tensor = Recv.apply(  # type: ignore[no-untyped-call]
                    state.anchor, tensor, one
                )
            return result

        return receive

    def enter(self, meta: Any) -> None:
        """Make the message's context the current one of the function it runs."""
        context_id, _ = _read_meta(meta)
        current_context_var.set(Context(self, context_id))

    # --- the backward pass, from its roots -------------------------------------------

    async def backward(
        self,
        context: Context,
        roots: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor | None] | None,
        *,
        retain_graph: bool,
    ) -> None:
        """Run a pass from local roots; see `asyncrpc.autograd.backward`."""
        state = self.state(context)
        given = _root_gradients(roots, gradients)
        pass_id = (self.worker.incarnation, self._next())
        one = state.passes[pass_id] = Pass()
        try:
            entries = self._add_roots(one, roots)
            edges = await self._discover(state, context.id, pass_id, one, entries)
            cyclic = workers_in_cycles(edges)
            arrived = dict(zip(entries, given, strict=True))
            await self._arrive(
                _Flow(context.id, pass_id, sorted(cyclic), retain_graph=retain_graph),
                state,
                one,
                arrived,
            )
        except BaseException as error:
            self._finish(context.id, pass_id, commit=False)
            if not isinstance(error, Exception) or _is_ours(error):
                raise
            raise self._failed(context, error) from error
        self._finish(context.id, pass_id, commit=True)

    def _add_roots(
        self, one: Pass, roots: Sequence[torch.Tensor]
    ) -> dict[CrossingId, None]:
        """Make the roots starts, under ids that no message has."""
        message = MessageId(Incarnation(0), 0)
        entries = [CrossingId(message, index) for index in range(len(roots))]
        for crossing, root in zip(entries, roots, strict=True):
            one.starts[crossing] = edge_of(root)
            one.machine.add_start(crossing)
        return dict.fromkeys(entries)

    def _finish(
        self, context_id: ContextId, pass_id: tuple[int, int], *, commit: bool
    ) -> None:
        """Commit or abort a pass here, and on the workers that this one asked."""
        state = self._contexts.get(context_id)
        one = None if state is None else state.end_pass(pass_id)
        if state is None or one is None:
            return
        if commit:
            state.commit(one.staged)
        else:
            _abort(one, "the pass has failed on another worker")
        # The way the discovery took, so those whom only others know learn of it too;
        # on each link it comes after the request that made them take part.
        for peer in one.onward - {self.worker.incarnation, Incarnation(pass_id[0])}:
            link = self.worker.directory.link_of(peer)
            if link is not None:
                how = "commit" if commit else "abort"
                link.notify(SERVICE, how, [*context_id, *pass_id])

    def _failed(self, context: Context, error: Exception) -> BackwardFailedError:
        worker = self.worker.name
        if isinstance(error, RemoteError):
            worker = error.worker
        elif isinstance(error, CallError):  # it is lost, or would not answer
            worker = error.to or worker
        return BackwardFailedError(
            f"Error on worker {worker!r}: {_text(error)}",
            worker=worker,
            context_id=str(context.id),
        )

    # --- phase 1 ---------------------------------------------------------------------

    async def _discover(
        self,
        state: ContextState,
        context_id: ContextId,
        pass_id: tuple[int, int],
        one: Pass,
        entries: Iterable[CrossingId],
    ) -> Edges:
        """Walk on from new starts, here and on the workers behind them."""
        reached = one.region.extend([one.starts[entry] for entry in entries])
        edges: Edges = set()
        requests = []
        # First all links: one that cannot be had leaves nobody asked.
        asked = await self._links_to(_by_sender(reached))
        if pass_id not in state.passes:  # after its end nobody may be asked
            raise AutogradError("the pass has been aborted")
        for link, crossings in asked:
            edges.add((self.worker.incarnation, link.peer.incarnation))
            one.onward.add(link.peer.incarnation)
            wanted = [[key.message.serial, key.position] for key in crossings]
            requests.append(
                link.request_service(
                    SERVICE, "discover", [*context_id, *pass_id, wanted]
                )
            )
        for found in await gather(requests):
            edges |= {(int(source), int(target)) for source, target in found}
        return edges

    async def _on_discover(self, _link: Link, value: Any) -> list[list[int]]:
        *ids, wanted = value
        context_id, pass_id = _read_ids(ids)
        state = self.state(context_id)
        one = state.join_pass(pass_id)
        entries = []
        for serial, index in wanted:
            message = MessageId(self.worker.incarnation, int(serial))
            crossing = CrossingId(message, int(index))
            try:
                edge = state.sent[message][crossing.position]
            except LookupError:
                raise AutogradError(
                    f"nothing was sent as {crossing} in context {context_id}; was the "
                    "tensor received in another context?"
                ) from None
            one.machine.add_start(crossing)
            one.starts[crossing] = edge
            entries.append(crossing)
        edges = await self._discover(state, context_id, pass_id, one, entries)
        return [list(edge) for edge in edges]

    # --- phase 2 ---------------------------------------------------------------------

    async def _on_gradients(self, _link: Link, value: Any) -> None:
        *ids, retain_graph, cyclic, keys, gradients = value
        context_id, pass_id = _read_ids(ids)
        state = self.state(context_id)
        one = state.passes.get(pass_id)
        if one is None:
            raise AutogradError("the pass has been aborted")
        crossings = [
            CrossingId(MessageId(self.worker.incarnation, int(serial)), int(index))
            for serial, index in keys
        ]
        arrived = dict(zip(crossings, gradients, strict=True))
        flow = _Flow(context_id, pass_id, cyclic, retain_graph=bool(retain_graph))
        await self._arrive(flow, state, one, arrived)

    async def _arrive(
        self,
        flow: _Flow,
        state: ContextState,
        one: Pass,
        arrived: dict[CrossingId, torch.Tensor | None],
    ) -> None:
        """Take gradients; return when all that follows from them has been done."""
        mode = flow.mode_on(self.worker.incarnation, len(one.starts))
        if mode is Mode.PARTIAL and not one.reach_is_set:
            one.reach_is_set = True
            reach = reach_of(one.starts)
            one.machine.set_reach(
                {key: [each.crossing for each in found] for key, found in reach.items()}
            )
        one.arrived.update(arrived)
        for crossing in arrived:
            one.ran[crossing] = self.worker.loop.create_future()
        batch = one.machine.arrive(arrived, mode)
        if batch:
            task = self.worker.start_task(self._run(flow, one, batch, mode))
            one.tasks.add(task)
            task.add_done_callback(one.tasks.discard)
        await gather([one.ran[crossing] for crossing in arrived])

    async def _run(
        self, flow: _Flow, one: Pass, batch: list[CrossingId], mode: Mode
    ) -> None:
        """Run starts, then send on what they gave; tell those who wait for them."""
        try:
            leaves = await self._run_starts(flow, one, batch, mode)
            await self._send_on(flow, one, leaves)
        except asyncio.CancelledError:
            _settle(one, batch, AutogradError("the pass has been aborted"))
            raise
        except Exception as error:  # noqa: BLE001  (whoever waits gets it)
            _settle(one, batch, error)
        else:
            _settle(one, batch, None)

    async def _run_starts(
        self, flow: _Flow, one: Pass, batch: list[CrossingId], mode: Mode
    ) -> list[Received]:
        """Run starts in a thread; return the received tensors that are complete."""
        starts = [
            (one.starts[crossing], gradient)
            for crossing in batch
            if (gradient := one.arrived.pop(crossing)) is not None
        ]
        region, engine = one.region, self.engine
        if mode is Mode.WHOLE:
            one.staged, one.leaving = await self._in_thread(
                lambda: engine.run_whole(starts, region, retain_graph=flow.retain_graph)
            )
            one.machine.ran(batch)
            return region.received
        # Runs overlap in the graph: only the last one may free it.
        keep = flow.retain_graph or not one.machine.is_last(batch)
        sums = one.sums, one.leaving
        await self._in_thread(
            lambda: engine.run_partial(starts, region, sums, retain_graph=keep)
        )
        complete = set(one.machine.ran(batch))
        if one.machine.is_done:
            one.staged = await self._in_thread(lambda: engine.finish_partial(one.sums))
        return [each for each in region.received if each.crossing in complete]

    async def _send_on(
        self, flow: _Flow, one: Pass, leaves: Sequence[Received]
    ) -> None:
        """Send the gradients of received tensors to those who sent them."""
        gradients = {leaf.crossing: one.leaving.pop(leaf, None) for leaf in leaves}
        requests = []
        for link, crossings in await self._links_to(_by_sender(leaves)):
            value = [
                *flow.context_id,
                *flow.pass_id,
                flow.retain_graph,
                list(flow.cyclic),
                [[key.message.serial, key.position] for key in crossings],
                [gradients[key] for key in crossings],
            ]
            requests.append(link.request_service(SERVICE, "gradients", value))
        await gather(requests)

    def _in_thread(self, job: Callable[[], T]) -> asyncio.Future[T]:
        return self.worker.run_in_thread(job)

    async def _links_to(self, crossings: Mapping[WorkerId, T]) -> list[tuple[Link, T]]:
        return [
            (await self._link_to(peer), for_it) for peer, for_it in crossings.items()
        ]

    async def _link_to(self, peer: WorkerId) -> Link:
        """Return the link to a worker that takes part.

        Raises:
            WorkerLostError: it is gone, or has been restarted since.
        """
        link = self.worker.directory.link_of(peer.incarnation)
        if link is None:
            link = await self.worker.link_to(peer.name)
            if link.peer != peer:
                raise AutogradError(
                    f"worker {peer.name!r} has been restarted since it took part"
                )
        return link

    # --- messages (Service) ----------------------------------------------------------

    async def on_request(self, link: Link, method: str, value: Any) -> Any:
        """Take part in a pass."""
        handler = self._handlers.get(method)
        if handler is None or type(value) is not list:
            raise MalformedError(f"autograd does not answer {method!r}")
        return await handler(link, value)

    def on_notice(self, link: Link, method: str, value: Any) -> None:
        """End a pass or a context."""
        if method == "release":
            self.release(ContextId(*value))
        elif method in ("commit", "abort"):
            context_id, pass_id = _read_ids(value)
            self._finish(context_id, pass_id, commit=method == "commit")
        else:
            raise MalformedError(f"there is no message {method!r} about autograd")

    def on_peer_lost(self, peer: WorkerId, reason: str) -> None:
        """End the contexts that a dead worker opened: nobody else will."""
        _ = reason  # requests under way fail by themselves
        for context_id in list(self._contexts):
            if context_id.creator == peer.incarnation:
                self.release(context_id)
                continue
            for pass_id in list(self._contexts[context_id].passes):
                if pass_id[0] == peer.incarnation:
                    self._finish(context_id, pass_id, commit=False)

    async def close(self) -> None:
        """Let go of every graph."""
        self._contexts.clear()

    def _next(self) -> int:
        self._serial += 1
        return self._serial


class _Flow:
    """What travels with the gradients of one pass."""

    __slots__ = ("context_id", "cyclic", "pass_id", "retain_graph")

    def __init__(
        self,
        context_id: ContextId,
        pass_id: tuple[int, int],
        cyclic: Sequence[int],
        *,
        retain_graph: bool,
    ) -> None:
        self.context_id = context_id
        self.pass_id = pass_id
        self.cyclic = cyclic
        self.retain_graph = retain_graph

    def mode_on(self, worker: int, starts: int) -> Mode:
        """Say how a worker runs its starts; a single one waits for no other."""
        is_partial = starts > 1 and worker in self.cyclic
        return Mode.PARTIAL if is_partial else Mode.WHOLE


async def gather(futures: Sequence[Any]) -> list[Any]:
    """Await all; the first error is raised at once, the rest are let go."""
    if not futures:
        return []
    return await asyncio.gather(*futures)


def _is_ours(error: Exception) -> bool:
    """Say whether an error of autograd arose here, and so needs no more words."""
    return isinstance(error, AutogradError) and not isinstance(error, RemoteError)


def _settle(
    one: Pass, batch: Iterable[CrossingId], error: BaseException | None
) -> None:
    for crossing in batch:
        future = one.ran.get(crossing)
        if future is None or future.done():
            continue
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)
            future.exception()  # the waiter may be gone already


def _abort(one: Pass, reason: str) -> None:
    for task in one.tasks:
        task.cancel()
    _settle(one, list(one.ran), AutogradError(reason))


def _by_sender(received: Iterable[Received]) -> dict[WorkerId, list[CrossingId]]:
    grouped: dict[WorkerId, list[CrossingId]] = {}
    for one in received:
        grouped.setdefault(one.sender, []).append(one.crossing)
    return grouped


def _root_gradients(
    roots: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None] | None
) -> list[torch.Tensor | None]:
    """Check the roots; return the gradient that each starts with."""
    if not roots:
        raise UsageError("backward needs at least one root")
    if gradients is not None and len(gradients) != len(roots):
        raise UsageError(f"{len(gradients)} gradients for {len(roots)} roots")
    found: list[torch.Tensor | None] = []
    for index, root in enumerate(roots):
        if not isinstance(root, torch.Tensor):
            raise UsageError(f"root {index} is a {type(root).__name__}, not a tensor")
        if not root.requires_grad:
            raise NoGradientPathError(
                f"root {index} of shape {tuple(root.shape)} does not require a gradient"
            )
        gradient = None if gradients is None else gradients[index]
        if gradient is None and root.numel() != 1:
            raise UsageError(
                f"root {index} of shape {tuple(root.shape)} is no scalar: give its "
                "gradient (gradients=[...])"
            )
        found.append(torch.ones_like(root) if gradient is None else gradient)
    return found


def _read_meta(meta: Any) -> tuple[ContextId, int]:
    if type(meta) is not list or len(meta) != 3:  # noqa: PLR2004
        raise MalformedError("an autograd context that is no array of three")
    creator, serial, message = (int(part) for part in meta)
    return ContextId(Incarnation(creator), serial), message


def _read_ids(ids: Sequence[Any]) -> tuple[ContextId, tuple[int, int]]:
    if len(ids) != 4:  # noqa: PLR2004
        raise MalformedError("a message about a pass without its ids")
    creator, serial, *pass_id = (int(part) for part in ids)
    return ContextId(Incarnation(creator), serial), (pass_id[0], pass_id[1])


def _text(error: BaseException) -> str:
    if isinstance(error, RemoteError):
        return f"{error.remote_type}: {error.remote_message}"
    return f"{type(error).__name__}: {error}"
