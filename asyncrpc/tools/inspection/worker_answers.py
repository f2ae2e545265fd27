"""Makes a worker's answers on its calls, its training and itself; on its loop.

The number of items read is limited, so that the loop is held for a fraction of a
millisecond.
"""

from __future__ import annotations

import platform
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import islice
from typing import Any, Final, TypeVar

import torch

from asyncrpc.core.calls.streams import StreamReceiver
from asyncrpc.core.parts import Parts
from asyncrpc.errors import MalformedError
from asyncrpc.tools.inspection.details import (
    BUCKETS_MAX,
    FUNCTIONS_MAX,
    KEPT_BACK,
    LINKS_MAX,
    PASSES_MAX,
    RUNS,
    SENT,
    WAITS_FOR_THREAD,
    WAITS_FOR_VALUE,
    BucketRates,
    CallSeen,
    CallsSeen,
    FunctionRates,
    LinkDetails,
    NamedBytes,
    NamedText,
    PassUnderWay,
    StageSpanSeen,
    StageStepSeen,
    TrainingSeen,
    WorkerDetails,
    context_name,
)
from asyncrpc.tools.inspection.events import is_own
from asyncrpc.tools.inspection.machine.rates import by_function, rates_of
from asyncrpc.tools.inspection.records import UNKNOWN_S, CallKey
from asyncrpc.tools.inspection.summaries import LinkSummary
from asyncrpc.tools.inspection.summarizing import (
    EVENTS_MAX,
    TRAINING_KINDS,
    WINDOW_S,
    link_summaries,
    median_s,
    newest_events,
    resident_bytes,
)
from asyncrpc.trace import BucketReduced, StageStep

T = TypeVar("T")

_SECRETS: Final = frozenset({"secret", "secret_file", "token", "tls"})
_OPTION_CHARACTERS_MAX: Final = 200


# --- calls ---------------------------------------------------------------------------


def calls_of(worker: Parts, at_most: int) -> CallsSeen:
    """Return the open calls of a worker: the oldest of each link.

    Calls that look at the worker are left out.
    """
    links = worker.directory.links
    now_s, own = worker.recorder.now_s(), worker.identity.incarnation
    share = max(1, at_most // max(1, 2 * len(links)))
    calls: list[CallSeen] = []
    total = 0
    for link in links:
        total += len(link.pending) + len(link.served)
        if len(calls) >= at_most:
            continue
        seen = [*islice(_outgoing(link, own, now_s), share)]
        seen += islice(_served(link, own, now_s), share)
        shown = [call for call in seen if not is_own(call)]
        total -= len(seen) - len(shown)
        calls += shown
    return CallsSeen(calls, total - len(calls))


def _outgoing(link: Any, own: int, now_s: float) -> Iterator[CallSeen]:
    waiting = link.credit.waiting
    for call in link.pending.calls.values():
        yield CallSeen(
            CallKey(own, link.peer.incarnation, call.call_id),
            is_served=False,
            other=link.peer.name,
            function=call.function,
            for_s=_age(call.began_s, now_s),
            state=KEPT_BACK if call.call_id in waiting else SENT,
            is_stream=isinstance(call, StreamReceiver),
        )


def _served(link: Any, own: int, now_s: float) -> Iterator[CallSeen]:
    for call in link.served:
        yield CallSeen(
            CallKey(link.peer.incarnation, own, call.call_id),
            is_served=True,
            other=link.peer.name,
            function=call.function_name,
            for_s=_age(call.came_s, now_s),
            state=_state(call),
            is_stream=call.credit is not None,
        )


def _state(call: Any) -> str:
    if call.wanted is not None:
        return WAITS_FOR_VALUE
    is_begun = call.task is not None or call.began_s > call.came_s
    return RUNS if is_begun else WAITS_FOR_THREAD


def _age(began_s: float, now_s: float) -> float:
    return max(0.0, now_s - began_s) if began_s else UNKNOWN_S


# --- training ------------------------------------------------------------------------


def training_of(worker: Parts, newest_max: int) -> TrainingSeen:
    """Return the training of a worker, with its newest passes and steps."""
    newest_max = min(newest_max, PASSES_MAX)
    recorder = worker.recorder
    recent = newest_events(recorder, TRAINING_KINDS)
    rates = rates_of(recent, window_s=WINDOW_S, remembered_max=EVENTS_MAX)
    now_s = recent.now_s
    return TrainingSeen(
        now_s,
        rates.passes_per_s,
        rates.steps_per_s,
        rates.collectives_per_s,
        median_s(recent.passes),
        median_s(recent.steps),
        recorder.passes.newest(0.0, newest_max),
        _under_way(worker, now_s),
        recorder.steps.newest(0.0, newest_max),
        _buckets(recorder.buckets.newest(now_s - WINDOW_S, EVENTS_MAX)),
        _stages(recorder.stage_steps),
    )


def _under_way(worker: Parts, now_s: float) -> list[PassUnderWay]:
    try:
        service: Any = worker.service("autograd")
    except MalformedError:  # a worker of torch's backend has none
        return []
    passes = (
        PassUnderWay(
            context_name(state.id),
            backward_pass.root,
            _age(backward_pass.began_s, now_s),
        )
        for state in list(service.contexts.open.values())
        for backward_pass in list(state.passes.values())
    )
    return list(islice(passes, PASSES_MAX))


def _buckets(events: Sequence[BucketReduced]) -> list[BucketRates]:
    by_place = defaultdict[int, list[BucketReduced]](list)
    for event in events:
        by_place[event.bucket].append(event)
    return [
        BucketRates(
            place,
            reductions[-1].nbytes,
            len(reductions) / WINDOW_S,
            median_s(reductions),
        )
        for place, reductions in sorted(by_place.items())[:BUCKETS_MAX]
    ]


def _stages(steps: Iterable[StageStep]) -> list[StageStepSeen]:
    """Return the last step of each pipeline and stage."""
    newest = {(step.stages, step.stage): step for step in tuple(steps)}
    return [
        StageStepSeen(
            step.at_s,
            step.began_s,
            context_name(step.context_id),
            step.number,
            step.schedule,
            step.stage,
            step.stages,
            [StageSpanSeen(*span) for span in step.spans],
        )
        for step in newest.values()
    ]


# --- all about it --------------------------------------------------------------------


def details_of(worker: Parts) -> WorkerDetails:
    """Return the details of a worker."""
    recent = newest_events(worker.recorder)
    functions = [
        FunctionRates(name, rates)
        for name, rates in by_function(recent, window_s=WINDOW_S).items()
    ]
    functions.sort(key=lambda function: -function.rates.per_s)
    links = worker.directory.links
    summaries = link_summaries(links, recent, LINKS_MAX)
    return WorkerDetails(
        _versions(),
        list(dict.fromkeys(worker.listening)),
        list(_options(worker.options)),
        functions[:FUNCTIONS_MAX],
        max(0, len(functions) - FUNCTIONS_MAX),
        [_link_details(link, summary) for link, summary in summaries],
        len(links) - len(summaries),
        _memory(worker),
    )


def _link_details(link: Any, summary: LinkSummary) -> LinkDetails:
    lanes = link.connection.lanes
    return LinkDetails(
        summary.peer,
        summary.is_broken,
        link.connection.scheme,
        0 if lanes is None else len(lanes.lanes),
        summary.in_flight,
        len(link.served),
        summary.calls_per_s,
        summary.bytes_per_s,
        summary.p50_s,
    )


def _versions() -> list[NamedText]:
    # The top package must be loaded already, since this module is part of it.
    version = getattr(sys.modules.get("asyncrpc"), "__version__", "")
    return [
        NamedText("asyncrpc", version),
        NamedText("torch", str(torch.__version__)),
        NamedText("python", platform.python_version()),
        NamedText("system", f"{platform.system()} {platform.release()}"),
    ]


def _options(options: Any, prefix: str = "") -> Iterator[NamedText]:
    """Yield the options that differ from the default; secrets without their value."""
    default = type(options)()
    for field in fields(options):
        value, name = getattr(options, field.name), prefix + field.name
        if value == getattr(default, field.name):
            continue
        if field.name in _SECRETS:
            yield NamedText(name, "given")
        elif is_dataclass(value):
            yield from _options(value, f"{name}.")
        else:
            text = f"{value}" if not isinstance(value, Mapping) else repr(dict(value))
            yield NamedText(name, text[:_OPTION_CHARACTERS_MAX])


def _memory(worker: Parts) -> list[NamedBytes]:
    memory: Any = worker.memory
    return [
        NamedBytes("process_bytes", max(0, resident_bytes())),
        NamedBytes("slab_bytes", memory.own_bytes),
        NamedBytes("peers_slab_bytes", memory.borrowed_bytes),
        NamedBytes("receive_pool_bytes", worker.receive_pool.kept_bytes),
    ]
