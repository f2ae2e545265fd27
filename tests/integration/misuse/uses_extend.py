"""How services are built on workers, by `asyncrpc.extend`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from asyncrpc import LocalRendezvous, Worker, extend
from asyncrpc.core.rref.service import RRefService
from asyncrpc.tools.inspection.messages import ReadClock
from tests.integration.misuse.using import Use, nothing
from tests.integration.misuse.wrong import SECONDS, World

_CALLABLE: Final = {"a class", "a function", "a local function"}
_CALLABLE_OBJECT: Final = {*_CALLABLE, "raises in everything"}
_TEXT: Final = {"text", "too large"}
_RUNNING: Final = {"another worker"}


@extend.message("misused", "notice")
class SomeNotice(extend.Notice):
    count: extend.Count


class SomeTracer:
    called = served = nothing


async def _open_link(world: World) -> None:
    world.kept["link"] = await extend.host_of(world.a).link_to("b")


def _declaring(declare: Any, argument: str) -> Use:
    """Return how a decorator is made that says what a function does or waits for."""
    return Use(
        lambda _: declare,
        right={argument: lambda _: str},
        fits={argument: _CALLABLE_OBJECT},
        needs_worker=False,
        finish=nothing,
    )


def _route(make: Any, message: type) -> Use:
    return Use(
        lambda _: make,
        right={"kind": lambda _: message, "handler": lambda _: print},
        fits={"handler": _CALLABLE_OBJECT},
        needs_worker=False,
        finish=nothing,
    )


USES: Final[Mapping[str, Use]] = {
    "extend.add_service": Use(
        lambda _: extend.add_service,
        right={
            "worker": lambda _: Worker("new", rendezvous=LocalRendezvous(1)),
            "make": lambda _: RRefService,
        },
        fits={"make": _CALLABLE_OBJECT},
        needs_worker=False,
    ),
    "extend.service_of": Use(
        lambda _: extend.service_of,
        right={"worker": lambda world: world.a, "kind": lambda _: RRefService},
        fits={"worker": _RUNNING},
        says={"kind": r"\b(kind|class)\b"},
    ),
    "extend.host_of": Use(
        lambda _: extend.host_of,
        right={"worker": lambda world: world.a},
        fits={"worker": _RUNNING},
    ),
    "extend.trace_by": Use(
        lambda _: extend.trace_by,
        right={
            "worker": lambda _: Worker("new", rendezvous=LocalRendezvous(1)),
            "tracer": lambda _: SomeTracer,
        },
        fits={"worker": {"an ended worker", *_RUNNING}},
        needs_worker=False,
    ),
    "extend.tracer_of": Use(
        lambda _: extend.tracer_of,
        right={"worker": lambda world: world.a},
        fits={"worker": {"an ended worker", *_RUNNING}},
        needs_worker=False,
    ),
    "extend.message": Use(
        lambda _: extend.message,
        right={"service": lambda _: "misused", "method": lambda _: "made"},
        fits={
            "service": _TEXT,
            "method": _TEXT,
            "about": {*_TEXT, "empty text", "text with a surrogate"},
            "may_wait_s": (SECONDS | {"infinite"}) - {"none"},
        },
        needs_worker=False,
        finish=nothing,
    ),
    "extend.takes": _route(extend.takes, SomeNotice),
    "extend.answers": _route(extend.answers, ReadClock),
    "extend.ask": Use(
        lambda _: extend.ask,
        right={
            "link": lambda world: world.kept["link"],
            "request": lambda _: ReadClock(),
        },
        fits={"deadline": {"none"}, "device_map": {"none"}},
        ready=_open_link,
    ),
    "extend.waits": _declaring(extend.waits, "describe"),
    "extend.works_for": _declaring(extend.works_for, "find"),
    "extend.does": _declaring(extend.does, "label"),
}

_IMPLEMENTED: Final = "a service, or what traces calls, implements it"
_OFFERED: Final = "a service calls it with its own messages; extend.ask checks them"
_TIME: Final = "arithmetic of times, for `deadline` of extend.ask, which checks it"
_FIELD: Final = "the type of a field: message() makes it, and the router calls it"

LEFT_OUT: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        [
            *("extend.Service", "extend.Service.close", "extend.Service.on_peer_lost"),
            *("extend.CallTracer", "extend.CallTracer.batch", "extend.CallTracer.here"),
            *("extend.CallTracer.called", "extend.CallTracer.generation"),
            *("extend.CallTracer.request", "extend.CallTracer.served"),
            *("extend.CallSpan", "extend.CallSpan.end", "extend.CallSpan.failed"),
            "extend.CallSpan.noted",
        ],
        _IMPLEMENTED,
    ),
    **dict.fromkeys(
        [
            *("extend.ServiceHost", "extend.ServiceHost.add_service"),
            *("extend.ServiceHost.check_loop", "extend.ServiceHost.check_on_loop"),
            "extend.ServiceHost.expect",
            *("extend.ServiceHost.find_member", "extend.ServiceHost.find_service"),
            *("extend.ServiceHost.incarnation_of", "extend.ServiceHost.link_to"),
            *("extend.ServiceHost.open_link_to", "extend.ServiceHost.run_in_thread"),
            *("extend.ServiceHost.run_on_host", "extend.ServiceHost.start_task"),
            *("extend.ServiceHost.wait_idle", "extend.PeerLink"),
            *("extend.PeerLink.ask", "extend.PeerLink.check_room"),
            *("extend.PeerLink.tell", "extend.Route"),
            *("extend.Notice.pack", "extend.Request.pack"),
            "extend.Request.read_answer",
        ],
        _OFFERED,
    ),
    **dict.fromkeys(
        [
            *("extend.Deadline", "extend.Deadline.after", "extend.Deadline.budget_ns"),
            *("extend.Deadline.from_budget", "extend.Deadline.remaining_s"),
        ],
        _TIME,
    ),
    **{
        f"extend.{kind}{method}": _FIELD
        for kind in ("EnumName", "Integer", "RecordSchema")
        for method in ("", ".read", ".write", ".read_as")
    },
}
