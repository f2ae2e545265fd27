"""What a task waits for inside of asyncrpc: rounds, collectives, passes, turns.

Each wait is recognized by the function that waits and by its variables.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import CodeType
from typing import Any, Final

from asyncrpc.autograd.state import Pass
from asyncrpc.autograd.work import PassWork
from asyncrpc.collectives import Group
from asyncrpc.collectives.matching import CollectiveRun
from asyncrpc.ddp.exchange import Exchange
from asyncrpc.ddp.passes import Backward
from asyncrpc.inspection.awaits import AwaitStep, entered
from asyncrpc.inspection.names import local, locals_of
from asyncrpc.inspection.recognized import Recognize, Recognized
from asyncrpc.inspection.records import WaitKind
from asyncrpc.optim.per_owner import PerOwnerOptimizer
from asyncrpc.optim.service import OptimizerService
from asyncrpc.optim.turns import TurnQueue
from asyncrpc.runtime.calls.streams import StreamProducer, StreamReceiver
from asyncrpc.runtime.membership.rendezvous import LocalRendezvous
from asyncrpc.runtime.membership.stores import StoreRendezvous
from asyncrpc.runtime.rounds.graceful_shutdown import GracefulShutdown
from asyncrpc.runtime.rounds.participant import RoundParticipant

_END: Final = "the end of the group"
_RANKS_SHOWN: Final = 8
_DRAIN: Final[CodeType] = PassWork._drain.__code__  # noqa: SLF001
_DRAINED: Final = _DRAIN.co_varnames[1]  # the parameter that has the pass


def _item(step: AwaitStep, _: AwaitStep | None) -> Recognized:
    stream: StreamReceiver = local(step.frame, "self")
    return Recognized(WaitKind.STREAM, call=stream)


def _credit(_step: AwaitStep, _: AwaitStep | None) -> Recognized:
    return Recognized(WaitKind.CREDIT, "room at the consumer of its stream")


# --- all together --------------------------------------------------------------------


def _round(step: AwaitStep, _: AwaitStep | None) -> Recognized:
    participant: RoundParticipant = local(step.frame, "self")
    return Recognized(WaitKind.ROUND, participant.label, members=participant.members)


def _ending(step: AwaitStep, _: AwaitStep | None) -> Recognized | None:
    """Recognize a graceful shutdown: it waits for the others, or for calls here."""
    shutdown: GracefulShutdown = local(step.frame, "self")
    participant = shutdown.participant
    if participant is not None and participant.series.is_waiting:
        return Recognized(
            WaitKind.ROUND,
            participant.label,
            members=participant.members,
            needs=(_END,),
            since_s=shutdown.began_s,
        )
    return Recognized(WaitKind.IN_FLIGHT, "calls in flight", since_s=shutdown.began_s)


def _collective(step: AwaitStep, _: AwaitStep | None) -> Recognized:
    run: CollectiveRun = local(step.frame, "self")
    members, path = tuple(run.matching.members), run.matching.path
    needs = tuple(_group_labels(path))
    # A collective waits many times, on a new future each time.
    return Recognized(
        WaitKind.COLLECTIVE,
        run.label,
        members=members,
        needs=needs,
        since_s=run.began_s,
    )


def _at_store(step: AwaitStep, _: AwaitStep | None) -> Recognized:
    met: StoreRendezvous = local(step.frame, "self")
    return _start(met.missing, met.world_size)


def _at_start(step: AwaitStep, _: AwaitStep | None) -> Recognized:
    met: LocalRendezvous = local(step.frame, "self")
    return _start(met.missing, met.world_size)


def _start(missing: Sequence[int] | None, world_size: int) -> Recognized:
    """Recognize the wait for the others at the start.

    Args:
        missing: ranks that have not come; None: only rank 0 knows.
        world_size: how many ranks must come.
    """
    if missing is None:
        absent = f"rank 0 of {world_size} knows who is missing"
    else:
        shown = ", ".join(map(str, missing[:_RANKS_SHOWN]))
        more = len(missing) - _RANKS_SHOWN
        shown += f" and {more} more" if more > 0 else ""
        noun, verb = ("rank", "has") if len(missing) == 1 else ("ranks", "have")
        absent = f"{noun} {shown} of {world_size} {verb} not come"
    return Recognized(WaitKind.ROUND, f"the others at the start: {absent}")


# --- training ------------------------------------------------------------------------


def _pass(step: AwaitStep, _: AwaitStep | None) -> Recognized:
    backward_pass: Pass = local(step.frame, "self")
    return Recognized(WaitKind.BACKWARD, "its backward pass", backward_pass)


def _bucket(step: AwaitStep, _: AwaitStep | None) -> Recognized:
    current: Backward = local(step.frame, "self")
    total = len(current.results)
    bucket = local(step.frame, "bucket")
    which = "all gradients" if bucket is None else f"bucket {bucket + 1} of {total}"
    return Recognized(WaitKind.THREADS, f"{which} of a backward pass", current)


def _turn(step: AwaitStep, user: AwaitStep | None) -> Recognized:
    queue: TurnQueue = local(step.frame, "self")
    needs: tuple[str, ...] = ()
    if user is not None:
        variables = locals_of(user.frame)
        service, keys = variables.get("self"), local(step.frame, "keys")
        if isinstance(service, OptimizerService):
            needs = tuple(_step_label(*key) for key in service.kept_on(keys))
    return Recognized(
        WaitKind.TURN, "its turn to change parameters", queue, needs=needs
    )


def is_of_pass(backward_pass: Pass, call: Any) -> bool:
    """Return whether a call asks another worker to take part in a pass.

    Such a call has a callback that passes the answer to the pass.
    """
    return any(
        isinstance(callback, partial)
        and any(argument is backward_pass for argument in callback.args)
        for callback, _ in tuple(getattr(call, "_callbacks", None) or ())
    )


def works_for(backward_pass: Pass, steps: Sequence[AwaitStep]) -> bool:
    """Return whether a task runs the local part of a pass."""
    return any(
        step.code is _DRAIN and local(step.frame, _DRAINED) is backward_pass
        for step in steps
    )


OWN_WAITS: Final[Mapping[CodeType, Recognize]] = {
    StreamReceiver.take.__code__: _item,
    StreamProducer.wait.__code__: _credit,
    RoundParticipant.come.__code__: _round,
    GracefulShutdown.wait.__code__: _ending,
    StoreRendezvous.join.__code__: _at_store,
    LocalRendezvous.join.__code__: _at_start,
    CollectiveRun.take.__code__: _collective,
    CollectiveRun.settle.__code__: _collective,
    CollectiveRun.pause.__code__: _collective,
    CollectiveRun.until_done.__code__: _collective,
    Pass.idle.__code__: _pass,
    Backward.wait_full.__code__: _bucket,
    Backward.wait_over.__code__: _bucket,
    TurnQueue.take.__code__: _turn,
}


# --- what a task does for others -----------------------------------------------------


def labels_of(steps: Sequence[AwaitStep]) -> Iterator[str]:
    """Yield the labels of what a task does for others; see `records.Actor.does`."""
    for step in steps:
        make_label = _DOES.get(step.code)
        if make_label is not None:
            yield make_label(local(step.frame, "self"))
        for manager in entered(step):
            if isinstance(manager, Group):
                yield _group_label(_path_of(manager))


def _group_labels(path: str) -> Iterator[str]:
    """Yield the labels of a group and of its parent groups."""
    while path:
        yield _group_label(path)
        path = path.rpartition("/")[0]


def _group_label(path: str) -> str:
    return f"group {path}"


def _path_of(group: Group) -> str:
    return group._matching.path  # noqa: SLF001


def _step_label(maker: int, serial: int) -> str:
    return f"step {maker:016x}/{serial}"


def _of_optimizer(optimizer: PerOwnerOptimizer) -> str:
    return _step_label(*optimizer.key)


def _of_exchange(exchange: Exchange) -> str:
    return _group_label(_path_of(exchange.group))


def _of_end(_: Any) -> str:
    return _END


_DOES: Final[Mapping[CodeType, Any]] = {
    PerOwnerOptimizer._commit.__code__: _of_optimizer,  # noqa: SLF001
    inspect.unwrap(Exchange.run).__code__: _of_exchange,  # without its decorator
    GracefulShutdown.wait.__code__: _of_end,
}
