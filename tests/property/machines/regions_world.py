"""Two workers that share one region, and the network between them, in every order.

Messages between the two come in order.  An answer is taken by a task of its own: later
than it came, and in any order with others.  A question may fail at its end, and so may
what tells a peer; whoever answers does not know.

Safety: a message that refers to the region is read where the region is.  Liveness: once
nobody uses it, both let go of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Final, TypeAlias

from tests.property.machines.walk import visit_all

KEY: Final = b"key"
ASKED_MAX: Final = 3  # a question: a peer lets go once for each sweep
Action: TypeAlias = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Bounds:
    """How often each thing happens, at each of the two; a failure at either."""

    references: int = 1
    sweeps: int = 1
    failures: int = 0


@dataclass(slots=True)
class _Question:
    """A question of one end, and what it still waits for."""

    of: Any
    is_open: bool = True
    asked: int = 0

    def facts(self) -> object:
        return self.is_open, self.asked, *self.of.unconfirmed, *sorted(self.of._void)  # noqa: SLF001


@dataclass(slots=True)
class _End:
    """One of the two workers."""

    kept: Any
    peer: str
    has_users: bool
    references: int
    sweeps: int
    inbox: deque[Action] = field(default_factory=deque)  # from the other, in order
    arrived: list[Action] = field(default_factory=list)  # answers that nobody has taken
    questions: list[_Question] = field(default_factory=list)
    is_telling: bool = False

    def facts(self) -> object:
        """Return everything that is so at this end."""
        kept = vars(self.kept)
        return (
            (self.has_users, self.references, self.sweeps, self.is_telling),
            (tuple(self.inbox), tuple(self.arrived)),
            tuple(question.facts() for question in self.questions),
            (*kept["regions"], kept["_is_letting_go"]),
            (*sorted(kept["used"]), *sorted(kept["_awaited"].items())),
            tuple(
                state.name for state in kept["_at_peers"].get(self.peer, {}).values()
            ),
        )


class RegionsWorld:
    """Both workers after some actions; `a` has made the region."""

    def __init__(self, build: ModuleType, bounds: Bounds) -> None:
        self.failures = bounds.failures
        self.ends: dict[str, _End] = {}
        for name, peer in (("a", "b"), ("b", "a")):
            self.ends[name] = _End(
                kept=build.KeptRegions(has_users=lambda _, name=name: self._uses(name)),
                peer=peer,
                has_users=name == "a",
                references=bounds.references,
                sweeps=bounds.sweeps,
            )

    def _uses(self, name: str) -> bool:
        return self.ends[name].has_users

    def facts(self) -> object:
        """Return everything that is so, to tell worlds apart."""
        return (self.failures, *(end.facts() for end in self.ends.values()))

    def possible(self) -> Iterator[Action]:
        """Yield what may happen next."""
        for name, end in self.ends.items():
            may: dict[str, object] = {
                "refer": end.references and end.has_users,
                "drop": end.has_users,
                "sweep": end.sweeps,
                "deliver": end.inbox,
                "untold": self.failures and end.is_telling,
            }
            yield from ((what, name) for what, can_be in may.items() if can_be)
            for index in range(len(end.arrived)):
                yield "take", name, index
            for index, question in enumerate(end.questions):
                if self.failures and question.is_open:
                    yield "fail", name, index

    def do(self, action: Action) -> None:
        """Let something happen."""
        what, name, *rest = action
        getattr(self, f"_{what}")(self.ends[name], *rest)

    # --- what an end does by itself --------------------------------------------------

    def _refer(self, end: _End) -> None:
        end.references -= 1
        end.kept.keep(KEY, "region")
        missing = end.kept.missing(end.peer, [KEY])
        if missing:
            question = _Question(end.kept.begin(end.peer, missing))
            end.questions.append(question)
            self._ask(end, len(end.questions) - 1)
        else:
            self._send(end, "message")

    def _drop(self, end: _End) -> None:
        end.has_users = False

    def _sweep(self, end: _End) -> None:
        end.sweeps -= 1
        idle = end.kept.sweep()
        if not idle:
            return
        gone = end.kept.tell(end.peer, idle)
        if gone:
            end.is_telling = True
            self._send(end, "gone", end.sweeps)
        else:
            end.kept.let_go(idle)

    def _fail(self, end: _End, index: int) -> None:
        self.failures -= 1
        end.questions[index].is_open = False
        end.kept.end(end.questions[index].of)

    def _untold(self, end: _End) -> None:
        self.failures -= 1
        end.is_telling = False
        end.kept.let_go([KEY])

    def _ask(self, end: _End, index: int) -> None:
        question = end.questions[index]
        question.asked += 1
        assert question.asked <= ASKED_MAX, "it is asked again and again"
        assert question.of.ask() == [KEY]
        self._send(end, "has", index)

    def _send(self, end: _End, *message: Any) -> None:
        self.ends[end.peer].inbox.append(message)

    # --- what comes ------------------------------------------------------------------

    def _deliver(self, end: _End) -> None:
        message = end.inbox.popleft()
        kept = end.kept
        match message:
            case ("message",):
                assert kept.find(KEY) is not None, "its memory is not here"
                end.has_users = True
            case ("has", index):
                has = kept.find(KEY) is not None
                if has:
                    kept.on_asked(end.peer, KEY)
                self._send(end, "answer", index, has)
            case ("attach", index):
                kept.keep(KEY, "region")
                kept.on_asked(end.peer, KEY)
                has = True
                self._send(end, "answer", index, has)
            case ("gone", serial):
                kept.on_gone(end.peer, [KEY])
                self._send(end, "told", serial)
            case _:
                end.arrived.append(message)

    def _take(self, end: _End, index: int) -> None:
        match end.arrived.pop(index):
            case ("told", serial):
                if end.is_telling and serial == end.sweeps:
                    end.is_telling = False
                    end.kept.on_told(end.peer, [KEY])
                    end.kept.let_go([KEY])
            case (_, which, has):
                if end.questions[which].is_open:
                    self._take_answer(end, which, has=has)

    def _take_answer(self, end: _End, which: int, *, has: bool) -> None:
        question = end.questions[which]
        if not has:
            self._send(end, "attach", which)
            return
        end.kept.confirm(question.of, KEY)
        if question.of.unconfirmed:
            self._ask(end, which)
            return
        question.is_open = False
        end.kept.end(question.of)
        self._send(end, "message")

    # --- the end ---------------------------------------------------------------------

    def settle(self) -> None:
        """Let everything come to an end: nobody uses the region any more."""
        for end in self.ends.values():
            end.references = 0
        for _ in range(4):
            while todo := next(self._left(), None):
                self.do(todo)
            for name, end in self.ends.items():
                end.sweeps += 1
                end.has_users = False
                self.do(("sweep", name))
        while todo := next(self._left(), None):
            self.do(todo)
        assert not any(len(end.kept) for end in self.ends.values()), "it is kept"

    def _left(self) -> Iterator[Action]:
        for what in ("take", "deliver"):
            yield from (step for step in self.possible() if step[0] == what)


def visit(build: ModuleType, bounds: Bounds) -> int:
    """Visit all worlds; return how many there were."""
    return visit_all(
        lambda: RegionsWorld(build, bounds), lambda world, _: world.settle()
    )
