"""What each message may say of a third party: an example of every row of the table.

`ABOUT` has, for each message, how its content is made so that it speaks of a subject:
of another member or guest, of the receiver, of an absent name, or of a dead life.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch

from asyncrpc import RRef, Worker
from asyncrpc.autograd import Context
from asyncrpc.parallel.collectives.service import group_id

KEY: Final = bytes(16)
BLAME: Final = "collective"
BARRIER: Final = ("barrier", "", "", None, -1)


class Subject(NamedTuple):
    """Of whom a message speaks.

    Attributes:
        name: of the worker.
        incarnation: of the life that is meant.
        rank: of it.
        addresses: of it.
        value: the id of a value that it owns or holds.
        context: the id of a context that it has opened.
        group: the number of a group that it is in.
        members: of that group, with their lives.
        optimizer: its number, at its maker, of an optimizer at the receiver.
    """

    name: str
    incarnation: int
    rank: int
    addresses: tuple[str, ...]
    value: tuple[int, int]
    context: tuple[int, int]
    group: int
    members: tuple[tuple[str, int], ...]
    optimizer: int = 1


def subject_of(
    worker: Worker, value: RRef[Any], context: Context, members: list[Worker]
) -> Subject:
    return Subject(
        worker.name,
        int(worker.incarnation),
        worker.rank,
        worker.addresses or ("relay://ps",),
        (int(value.rref_id.creator), value.rref_id.serial),
        (int(context.id.creator), context.id.serial),
        group_id("", [member.name for member in members], 1),
        tuple((member.name, int(member.incarnation)) for member in members),
    )


About = Callable[[Subject], Any]


def _pass(s: Subject) -> list[Any]:
    return [*s.context, s.incarnation, 1]


def _advance(s: Subject) -> Any:
    more = [s.name, False, False, False, [], [1, 0], None, None, None]
    return [[torch.ones(3)], {"fields": [*_pass(s), *more]}]


def _failure(s: Subject) -> list[Any]:
    return [BLAME, "nothing has happened", [s.name]]


def _standing(s: Subject) -> list[Any]:
    ids = [list(member) for member in s.members]
    gone = [[s.name, s.incarnation], 9]
    return ["elastic", 2, ids, [0] * len(ids), True, [], [], [gone]]


def _news(s: Subject) -> list[Any]:
    where = [s.name, s.rank, s.incarnation, list(s.addresses), "", 1, 9, 2]
    later = [s.name, s.rank, 4242, ["tcp://127.0.0.1:9"], "", 2, 0, 0]
    return [[-1, where], [-1, later]]


def _series(s: Subject) -> list[Any]:
    return ["RENDEZVOUS", "of others", [0, 1] if s.rank < 1 else [1, 0]]


ABOUT: Final[dict[tuple[str, str, str], About]] = {
    ("rref", "NOTICE", "register"): lambda s: list(s.value),
    ("rref", "NOTICE", "registered"): lambda s: list(s.value),
    ("rref", "NOTICE", "gone"): lambda s: list(s.value),
    ("rref", "NOTICE", "probe"): lambda s: list(s.value),
    ("rref", "NOTICE", "settled"): lambda s: list(s.value),
    ("rref", "NOTICE", "release"): lambda s: [[[*s.value, 1]]],
    ("rref", "NOTICE", "returned"): lambda _: [list(range(1, 50))],
    ("autograd", "SERVICE", "advance"): _advance,
    ("autograd", "SERVICE", "close"): _pass,
    ("autograd", "SERVICE", "waits"): lambda s: [*_pass(s), [s.incarnation]],
    ("autograd", "SERVICE", "outcome"): _pass,
    ("autograd", "SERVICE", "join"): lambda s: list(s.context),
    ("autograd", "NOTICE", "commit"): _pass,
    ("autograd", "NOTICE", "abort"): _pass,
    ("autograd", "NOTICE", "release"): lambda s: list(s.context),
    ("optim", "SERVICE", "create"): lambda s: [
        *(s.optimizer, torch.optim.SGD),
        *([{"params": [list(s.value)]}], [], {"lr": 0.1}),
    ],
    ("optim", "SERVICE", "step"): lambda s: [
        *(s.optimizer, *s.context, None, False, False, [])
    ],
    ("optim", "SERVICE", "prepare"): lambda s: [s.optimizer, *s.context, False],
    ("optim", "SERVICE", "commit"): lambda s: [
        *(s.optimizer, *s.context, 1.0, True, False, [])
    ],
    ("optim", "SERVICE", "settle"): lambda s: [s.optimizer, False],
    ("optim", "SERVICE", "begin"): lambda s: [s.optimizer],
    ("optim", "SERVICE", "assign"): lambda s: [s.optimizer, [torch.ones(3)], False],
    ("optim", "SERVICE", "gradients"): lambda s: [s.optimizer, *s.context],
    ("optim", "SERVICE", "values"): lambda s: [s.optimizer],
    ("optim", "SERVICE", "add_group"): lambda s: [s.optimizer, {"params": []}],
    ("optim", "SERVICE", "state"): lambda s: [s.optimizer],
    ("optim", "SERVICE", "load_state"): lambda s: [s.optimizer, {}],
    ("optim", "SERVICE", "set_options"): lambda s: [s.optimizer, []],
    ("optim", "NOTICE", "drop"): lambda s: [s.optimizer],
    ("relay", "NOTICE", "dial"): lambda s: [
        *(s.name, s.name, s.rank, s.incarnation, ["tcp://127.0.0.1:9"], "")
    ],
    ("relay", "NOTICE", "meet"): lambda s: [s.name, 1],
    ("memory", "NOTICE", "attach"): lambda _: [0, 4096, KEY],
    ("memory", "NOTICE", "attached"): lambda s: [0, f"{s.name} has not"],
    ("memory", "NOTICE", "detach"): lambda _: [[0, 1, 2]],
    ("regions", "SERVICE", "has"): lambda _: [[[KEY, 5]]],
    ("regions", "SERVICE", "attach"): lambda _: [KEY, 4096, KEY],
    ("regions", "SERVICE", "attach_part"): lambda _: [KEY, 4096, KEY, 4096],
    ("regions", "SERVICE", "open"): lambda _: [KEY, 4096, KEY, "cpu", []],
    ("regions", "SERVICE", "gone"): lambda _: [[KEY]],
    ("replicas", "SERVICE", "watch"): lambda _: [],
    ("replicas", "SERVICE", "news"): lambda _: [[True, True, 1.0, 0.0, 1.0, 0.0, 9]],
    ("weights", "SERVICE", "versions"): lambda _: [],
    ("weights", "SERVICE", "canary"): lambda _: [99, 0.5],
    ("weights", "SERVICE", "rollback"): lambda _: [99],
    ("weights", "SERVICE", "send"): lambda _: [0],
    ("weights", "SERVICE", "begin"): lambda _: [1, 0, []],
    ("weights", "SERVICE", "put"): lambda _: [1, ["weight"], [torch.zeros(1, 1)]],
    ("weights", "SERVICE", "commit"): lambda _: [1, 0.0],
    ("weights", "SERVICE", "abandon"): lambda _: [1],
    ("inspection", "SERVICE", "snapshot"): lambda _: [True],
    ("inspection", "SERVICE", "collectives"): lambda _: [],
    ("inspection", "SERVICE", "last_collectives"): lambda _: [10],
    ("inspection", "SERVICE", "summary"): lambda _: [],
    ("inspection", "SERVICE", "details"): lambda _: [],
    ("inspection", "SERVICE", "calls"): lambda _: [10],
    ("inspection", "SERVICE", "training"): lambda _: [10],
    ("inspection", "SERVICE", "clock"): lambda _: [],
    ("inspection", "SERVICE", "events"): lambda _: [["calls"], 10],
    ("inspection", "SERVICE", "references"): lambda _: [10],
    ("inspection", "SERVICE", "checkup"): lambda _: [],
    ("inspection", "SERVICE", "beside"): lambda s: [s.incarnation, list(s.addresses)],
    ("rounds", "NOTICE", "arrivals"): lambda s: [*_series(s), 5, 5, True, 5, b"\x03"],
    ("rounds", "NOTICE", "report"): lambda s: [*_series(s), 5, 5, True],
    ("rounds", "NOTICE", "result"): lambda s: [*_series(s), 5, True],
    ("rounds", "NOTICE", "failed"): lambda s: [
        *_series(s),
        *(0, -1, ["LOST", "nothing", [max(s.rank, 0)], None]),
    ],
    ("rounds", "NOTICE", "elsewhere"): lambda s: [
        *_series(s),
        *(0, max(s.rank, 0), [[1, 0], 0]),
    ],
    ("rounds", "NOTICE", "left_out"): lambda s: [s.incarnation],
    ("rendezvous", "SERVICE", "collect"): lambda s: [*_series(s)[1:], 5],
    ("rendezvous", "SERVICE", "share"): lambda s: [*_series(s)[1:], 5, [b"", b""], ""],
    ("collectives", "SERVICE", "block"): lambda s: [
        *(s.group, 5, 0, 0, list(BARRIER), [torch.ones(4)])
    ],
    ("collectives", "SERVICE", "point"): lambda s: [s.group, 0, 0, torch.ones(4)],
    ("collectives", "SERVICE", "begun"): lambda s: [s.group],
    ("collectives", "NOTICE", "begun"): lambda s: [s.group, 5, 0, list(BARRIER)],
    ("collectives", "NOTICE", "woke"): lambda s: [s.group],
    ("collectives", "NOTICE", "failed"): lambda s: [s.group, 5, _failure(s)],
    ("collectives", "NOTICE", "left"): lambda s: [s.group, 0, _failure(s)],
    ("collectives", "NOTICE", "lost"): lambda s: [s.group, _failure(s)],
    ("collectives", "NOTICE", "standing"): _standing,
    ("code", "SERVICE", "put"): lambda s: [f"by value:{s.name}", b"\x80", "", [s.name]],
    ("cluster", "SERVICE", "end"): lambda _: [],
    ("cluster", "SERVICE", "stay"): lambda s: [[s.name]],
    ("cluster", "SERVICE", "meet"): lambda s: [[s.name]],
    ("cluster", "SERVICE", "is_program"): lambda _: [],
    ("cluster_code", "SERVICE", "offer"): lambda _: [["a.py"], [KEY]],
    ("cluster_code", "SERVICE", "put"): lambda _: [[b"1 / 0"]],
    ("cluster_code", "SERVICE", "use"): lambda _: [],
    ("membership", "SERVICE", "members"): lambda _: [],
    ("membership", "SERVICE", "find"): lambda s: [s.name],
    ("membership", "SERVICE", "ping"): lambda _: [],
    ("membership", "SERVICE", "sync"): lambda s: [s.incarnation],
    ("membership", "SERVICE", "exchange"): lambda s: [[0, 63], _news(s)],
    ("membership", "NOTICE", "news"): lambda s: [_news(s)],
}
