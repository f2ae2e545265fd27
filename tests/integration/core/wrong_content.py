"""What a peer that has proved who it is may send all the same: every message, wrong.

`EXAMPLES` has, for each method of each service, a value of the right form that concerns
nothing real.  `spoiled` gives what is wrong with it in one place.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch

from asyncrpc import Worker

DEEP: Final[list[Any]] = [[[[[[[[[[[[[[[[[["deep"]]]]]]]]]]]]]]]]]]

# None of it is what any method takes as a whole.
JUNK: Final[tuple[Any, ...]] = (
    True,
    -2,
    2**64,
    -(2**70),
    10**400,
    1.5,
    float("nan"),
    float("-inf"),
    b"\xff" * 9,
    ("1", 2),
    {"a": 1},
    DEEP,
    [None],
    [-1, -1, -1, -1, -1],
    [2**64] * 4,
    ["a"] * 6,
    [float("nan")] * 4,
    torch.ones(2),
    [torch.ones(2)],
    [[torch.ones(1)], {"fields": [1] * 13}],
    [[], {"fields": None}],
    [[], {}],
)

# No field of a message may be any of these, but for those that may be anything.
WRONG_FIELDS: Final[tuple[Any, ...]] = (
    -(2**70),
    2**64,
    1.5j,
    float("nan"),
    {1: 2},
    b"\xff" * 9,
    DEEP,
    torch.ones(1),
)

KEY: Final = bytes(16)
STRANGER: Final = 7  # an incarnation that no worker has
GROUP: Final = 12345  # a group of collectives that nobody has made


def examples(attacker: Worker, victim: Worker) -> dict[tuple[str, str], Any]:
    """Return, for each method, a value of the right form about nothing real."""
    me = int(attacker.incarnation)
    about = [STRANGER, 1]  # a context, or a reference, of nobody
    ids = [*about, STRANGER, 1]
    fields = [*ids, attacker.name, False, False, False, [], [5, 0], None, None, None]
    how = [False, []]
    return {
        ("rref", "register"): [int(victim.incarnation), 999],
        ("rref", "registered"): about,
        ("rref", "gone"): about,
        ("rref", "probe"): [int(victim.incarnation), 999],
        ("rref", "settled"): [me, 999],
        ("rref", "release"): [[[*about, 1], [int(victim.incarnation), 999, 5]]],
        ("rref", "returned"): [[999, 1000]],
        ("autograd", "advance"): [[torch.ones(1)], {"fields": fields}],
        ("autograd", "close"): ids,
        ("autograd", "waits"): [*ids, [me]],
        ("autograd", "outcome"): ids,
        ("autograd", "join"): about,
        ("autograd", "commit"): ids,
        ("autograd", "abort"): ids,
        ("autograd", "release"): about,
        ("optim", "create"): [999, torch.optim.SGD, [{"params": [5]}], [], {"lr": 0.1}],
        ("optim", "step"): [999, *about, None, False, *how],
        ("optim", "prepare"): [999, *about, False],
        ("optim", "commit"): [999, *about, 1.0, True, *how],
        ("optim", "settle"): [999, True],
        ("optim", "begin"): [999],
        ("optim", "assign"): [999, [torch.ones(1)], False],
        ("optim", "gradients"): [999, *about],
        ("optim", "values"): [999],
        ("optim", "add_group"): [999, {"params": []}],
        ("optim", "state"): [999],
        ("optim", "load_state"): [999, {}],
        ("optim", "set_options"): [999, []],
        ("optim", "drop"): [999],
        ("code", "put"): ["by value:nothing", b"", "", ["by value:nothing"]],
        ("inspection", "snapshot"): [True],
        ("inspection", "collectives"): [],
        ("inspection", "last_collectives"): [10],
        ("inspection", "summary"): [],
        ("inspection", "details"): [],
        ("inspection", "calls"): [10],
        ("inspection", "training"): [10],
        ("inspection", "clock"): [],
        ("inspection", "events"): [["calls"], 10],
        ("inspection", "references"): [10],
        ("inspection", "checkup"): [],
        ("inspection", "beside"): [STRANGER, ["tcp://127.0.0.1:1"]],
        **_of_groups(),
    }


ROUND = ["RENDEZVOUS", "tag", None]


def _of_groups() -> dict[tuple[str, str], Any]:
    failure = ["collective", "nothing happened", []]
    record = ["nobody", -1, STRANGER, [], "", 0, 0, 0]
    return {
        ("collectives", "begun"): [GROUP],
        ("collectives", "block"): [GROUP, 1 << 40, 0, 0, None, [torch.ones(1)]],
        ("collectives", "point"): [1 << 62, -1, 0, torch.ones(1)],
        ("collectives", "woke"): [GROUP],
        ("collectives", "failed"): [GROUP, 1 << 40, failure],
        ("collectives", "left"): [GROUP, 1 << 40, failure],
        ("collectives", "lost"): [GROUP, failure],
        ("collectives", "standing"): ["nothing", 1, [STRANGER], [0], True, [], [], []],
        ("relay", "dial"): ["nobody", "nobody", -1, STRANGER, [], ""],
        ("relay", "meet"): ["nobody", 1],
        ("membership", "ping"): [],
        ("membership", "members"): [],
        ("membership", "find"): ["nobody"],
        ("membership", "sync"): [5],
        ("membership", "exchange"): [[0, 63], []],
        ("membership", "news"): [[[-1, record]]],
        ("rounds", "arrivals"): [*ROUND, 0, -1, True, 0, b"\xff"],
        ("rounds", "report"): [*ROUND, 0, -1, 1],
        ("rounds", "result"): [*ROUND, 0, 1],
        ("rounds", "failed"): [*ROUND, 0, -1, ["NOBODY", "", [], None]],
        ("rounds", "elsewhere"): [*ROUND, 0, 9, [None, 0]],
        ("rounds", "left_out"): [STRANGER],
        ("rendezvous", "collect"): [*ROUND[1:], 0],
        ("rendezvous", "share"): [*ROUND[1:], 0, [b""], ""],
        ("memory", "attach"): [3, 0, bytes(16)],
        ("memory", "attached"): [1023, "never"],
        ("memory", "detach"): [[1022, 1023]],
        ("regions", "has"): [[[KEY, 5]]],
        ("regions", "attach"): [KEY, 0, bytes(16)],
        ("regions", "attach_part"): [KEY, 0, bytes(16), 4096],
        ("regions", "open"): [KEY, 0, bytes(16), "cpu", []],
        ("regions", "gone"): [[KEY]],
    }


def spoiled(value: Any, depth: int = 3) -> Iterator[Any]:
    """Yield a value with one thing wrong, for each place in it that is a list's."""
    if type(value) is not list or not depth:
        return
    yield value[:-1] if value else None
    for index, part in enumerate(value):
        for wrong in WRONG_FIELDS:
            yield [*value[:index], wrong, *value[index + 1 :]]
        inner = part["fields"] if type(part) is dict and "fields" in part else part
        for variant in spoiled(inner, depth - 1):
            changed = {"fields": variant} if inner is not part else variant
            yield [*value[:index], changed, *value[index + 1 :]]
