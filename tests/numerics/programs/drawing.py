"""Draws programs: knows of every slot what a step may do with it, and does nothing.

What is ruled out is what one process refuses too (a leaf is not changed in place), or
what a message cannot keep: tensors of one message that share memory do so after it, but
autograd does not know, so they are not changed in place where they arrive.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, composite

from tests.numerics.programs import language as steps
from tests.numerics.programs.language import SHAPE, Program, Step

T = TypeVar("T")
STEPS_MAX: Final = 40
MESSAGE_MAX: Final = 3  # tensors
HOOKS: Final = ("look", "double", "clamp")
LEAF_HOOKS: Final = ("accumulated", "halve", "before", "after")


@dataclass(eq=False)
class Memory:
    """What views share.

    Attributes:
        values: the slots that see it.
        is_fixed: whether none of them may be changed in place.
    """

    values: list[Value] = field(default_factory=list)
    is_fixed: bool = False


@dataclass(eq=False)
class Value:
    """What is known of a slot.

    Attributes:
        slot: its number.
        home: the station that has it.
        shape: of the tensor.
        kind: "double", "complex" or "bfloat16".
        memory: what it shares.
        needs_gradient: whether it requires one.
        is_leaf: whether it is a parameter.
        has_own_node: whether its node is of an operation, not of a message.
        is_table: whether a sparse gradient may come to it, as to a parameter, or to one
            that was sent and not changed.
        gets_sparse: whether one may come.
        has_clamp: whether a hook of it takes no sparse one.
        sent_from: what it is a copy of, for a table.
    """

    slot: int
    home: str
    shape: tuple[int, ...]
    kind: str = "double"
    memory: Memory = field(default_factory=Memory)
    needs_gradient: bool = False
    is_leaf: bool = False
    has_own_node: bool = False
    is_table: bool = False
    gets_sparse: bool = False
    has_clamp: bool = False
    sent_from: Value | None = None

    def __post_init__(self) -> None:
        self.memory.values.append(self)

    @property
    def chain(self) -> list[Value]:
        """This one, what it is a copy of, and so on."""
        return [self, *(self.sent_from.chain if self.sent_from else [])]

    @property
    def takes_sparse(self) -> bool:
        return self.is_table and not any(value.has_clamp for value in self.chain)


@dataclass(eq=False)
class Box:
    """What is known of a reference."""

    number: int
    owner: str
    needs_gradient: bool
    holders: list[str]
    memory: Memory = field(default_factory=lambda: Memory(is_fixed=True))


class Drawer:
    """A program that is being drawn."""

    def __init__(self, draw: DrawFn, workers: int) -> None:
        self.draw = draw
        self.names = steps.NAMES[:workers]
        self.steps: list[Step] = []
        self.values: list[Value] = []
        self.boxes: list[Box] = []

    # --- choices ---------------------------------------------------------------------

    def one_of(self, among: Sequence[T]) -> T:
        return self.draw(st.sampled_from(among))

    def some_of(self, among: Sequence[T], most: int) -> list[T]:
        return self.draw(st.lists(st.sampled_from(among), min_size=1, max_size=most))

    def station(self) -> str:
        return self.one_of(self.names)

    def where(self, fits: Callable[[Value], bool], home: str = "") -> list[Value]:
        """Return slots, the newest first."""
        fitting = [
            value for value in self.values if fits(value) and home in {"", value.home}
        ]
        return fitting[::-1]

    def add(self, home: str, shape: tuple[int, ...] = SHAPE, **known: object) -> Value:
        value = Value(len(self.values), home, shape, **known)  # type: ignore[arg-type]
        self.values.append(value)
        return value

    # --- steps; each says whether it could be drawn ----------------------------------

    def parameter(self) -> bool:
        kind = self.one_of(KINDS)
        value = self.add(
            self.station(),
            kind=kind,
            needs_gradient=True,
            is_leaf=True,
            is_table=kind == "double",
        )
        self.steps.append(steps.Parameter(value.home, value.slot, kind))
        return True

    def constant(self) -> bool:
        value = self.add(self.station(), kind=self.one_of(KINDS))
        self.steps.append(steps.Constant(value.home, value.slot, value.kind))
        return True

    def mix(self) -> bool:
        if not self.values:
            return False
        first = self.one_of(self.values[::-1])
        others = self.some_of(self.where(any_value, first.home), MESSAGE_MAX)
        of = [first, *others]
        value = self.computed(first.home, of)
        self.steps.append(steps.Mix(first.home, value.slot, slots_of(of)))
        return True

    def computed(self, home: str, of: Sequence[Value], **known: object) -> Value:
        needs = any(value.needs_gradient for value in of)
        return self.add(home, needs_gradient=needs, has_own_node=needs, **known)  # type: ignore[arg-type]

    def turn(self) -> bool:
        if not self.values:
            return False
        of = self.one_of(self.values[::-1])
        into = self.one_of(["sum", "complex", "bfloat16"])
        shape = () if into == "sum" else SHAPE
        kind = "double" if into == "sum" else into
        value = self.computed(of.home, [of], shape=shape, kind=kind)
        self.steps.append(steps.Turn(of.home, value.slot, of.slot, into))
        return True

    def rows(self) -> bool:
        tables = self.where(lambda value: value.takes_sparse)
        if not tables:
            return False
        of = self.one_of(tables)
        for value in of.chain:
            value.gets_sparse = True
        result = self.computed(of.home, [of], shape=(3, 3))
        self.steps.append(steps.Rows(of.home, result.slot, of.slot))
        return True

    def deaf(self) -> bool:
        if not self.values:
            return False
        value = self.one_of(self.values[::-1])
        other = self.one_of(self.where(any_value, value.home))
        result = self.computed(value.home, [value, other])
        step = steps.Deaf(value.home, result.slot, value.slot, other.slot)
        self.steps.append(step)
        return True

    def detach(self) -> bool:
        if not self.values:
            return False
        of = self.one_of(self.values[::-1])
        value = self.add(of.home, of.shape, kind=of.kind)
        self.steps.append(steps.Detach(of.home, value.slot, of.slot))
        return True

    def view(self) -> bool:
        if not self.values:
            return False
        of = self.one_of(self.values[::-1])
        ways = views_of(of)
        if not ways:
            return False
        how = self.one_of(sorted(ways))
        value = self.add(
            of.home,
            ways[how],
            kind="double" if how in ("real", "imag") else of.kind,
            memory=of.memory,
            needs_gradient=of.needs_gradient,
            has_own_node=of.needs_gradient,
        )
        self.steps.append(steps.View(of.home, value.slot, of.slot, how))
        return True

    def change(self) -> bool:
        may_change = self.where(
            lambda value: (
                not value.memory.is_fixed
                and not any(each.is_leaf for each in value.memory.values)
            )
        )
        if not may_change:
            return False
        of = self.one_of(may_change)
        by = self.one_of(self.where(any_value, of.home))
        how = self.one_of(["mul", "add", "part"] if of.shape else ["mul", "add"])
        for value in of.memory.values:
            value.needs_gradient |= by.needs_gradient
            value.has_own_node = value.needs_gradient
            value.is_table = False
        self.steps.append(steps.Change(of.home, of.slot, by.slot, how))
        return True

    def hook(self) -> bool:
        may_hook = self.where(lambda value: value.needs_gradient)
        if not may_hook:
            return False
        of = self.one_of(may_hook)
        ways = [how for how in HOOKS if how != "clamp" or takes_clamp(of)]
        if of.is_leaf:
            ways += LEAF_HOOKS
        elif of.has_own_node:
            ways.append("before")
        how = self.one_of(ways)
        of.has_clamp |= how == "clamp"
        self.steps.append(steps.Hook(of.home, of.slot, how, len(self.steps)))
        return True

    # --- steps between stations ------------------------------------------------------

    def arrived(self, at: str, of: Sequence[Value]) -> tuple[int, ...]:
        """Add what a message brings."""
        shared = Counter(id(value.memory) for value in of)
        memories = {key: Memory(is_fixed=times > 1) for key, times in shared.items()}
        arrivals = []
        for value in of:
            # Twice in a message, it arrives as one: hooks of either are the other's.
            is_table = value.is_table and shared[id(value.memory)] == 1
            received = self.add(
                at,
                value.shape,
                kind=value.kind,
                memory=memories[id(value.memory)],
                needs_gradient=value.needs_gradient,
                is_table=is_table,
                sent_from=value if is_table else None,
            )
            arrivals.append(received)
        return slots_of(arrivals)

    def fetch(self) -> bool:
        if not self.values:
            return False
        first = self.one_of(self.values[::-1])
        at = self.one_of(self.names[::-1])
        self.fetch_to(at, first)
        return True

    def fetch_to(self, at: str, first: Value) -> tuple[int, ...]:
        local = self.where(any_value, first.home)
        of = [first, *self.draw(st.lists(st.sampled_from(local), max_size=2))]
        to = self.arrived(at, of)
        self.steps.append(steps.Fetch(at, to, first.home, slots_of(of)))
        return to

    def send(self) -> bool:
        if not self.values:
            return False
        first = self.one_of(self.values[::-1])
        of = self.some_of(self.where(any_value, first.home), MESSAGE_MAX)
        target = self.one_of(self.names[::-1])
        to = self.arrived(target, of)
        self.steps.append(steps.Send(first.home, to, target, slots_of(of)))
        return True

    def relay(self) -> bool:
        if not self.values:
            return False
        first = self.one_of(self.values[::-1])
        of = self.some_of(self.where(any_value, first.home), 2)
        way = self.some_of(self.values[::-1], 4)
        needs = any(value.needs_gradient for value in way)
        to = [
            self.add(first.home, needs_gradient=needs or value.needs_gradient)
            for value in of
        ]
        through = tuple((value.home, value.slot) for value in way)
        step = steps.Relay(first.home, slots_of(to), through, slots_of(of))
        self.steps.append(step)
        return True

    def remote(self) -> bool:
        if not self.values:
            return False
        first = self.one_of(self.values[::-1])
        of = self.some_of(self.where(any_value, first.home), MESSAGE_MAX)
        owner = self.one_of(self.names[::-1])
        local = self.where(any_value, owner)
        own = self.some_of(local, 2) if local else []
        needs = any(value.needs_gradient for value in [*of, *own])
        box = Box(len(self.boxes), owner, needs, [first.home])
        self.boxes.append(box)
        step = steps.Remote(first.home, box.number, owner, slots_of(own), slots_of(of))
        self.steps.append(step)
        return True

    def share(self) -> bool:
        if not self.boxes:
            return False
        box = self.one_of(self.boxes[::-1])
        others = [name for name in self.names if name not in box.holders]
        if not others:
            return False
        by, target = self.one_of(box.holders), self.one_of(others)
        box.holders.append(target)
        self.steps.append(steps.Share(by, box.number, target))
        return True

    def to_here(self) -> bool:
        if not self.boxes:
            return False
        box = self.one_of(self.boxes[::-1])
        at = self.one_of(box.holders[::-1])
        is_here = at == box.owner
        value = self.add(
            at,
            needs_gradient=box.needs_gradient,
            has_own_node=is_here and box.needs_gradient,
            memory=box.memory if is_here else Memory(),
        )
        self.steps.append(steps.ToHere(at, value.slot, box.number))
        return True

    def method(self) -> bool:
        pairs = [
            (box, value)
            for box in self.boxes[::-1]
            for value in self.values[::-1]
            if value.home in box.holders
            and (value.shape, value.kind) == (SHAPE, "double")
        ]
        if not pairs:
            return False
        box, of = self.one_of(pairs)
        needs = box.needs_gradient or of.needs_gradient
        result = self.add(of.home, needs_gradient=needs)
        self.steps.append(steps.Method(of.home, result.slot, box.number, of.slot))
        return True

    # --- passes ----------------------------------------------------------------------

    def backward(self) -> bool:
        may_be_root = self.where(lambda value: value.needs_gradient)
        if not may_be_root:
            return False
        first = self.one_of(may_be_root)
        others = self.where(lambda value: value.needs_gradient, first.home)
        more = self.draw(st.lists(st.sampled_from(others), max_size=2))
        self.go_backward([first, *more], retain_graph=True)
        return True

    def go_backward(self, roots: Sequence[Value], *, retain_graph: bool) -> None:
        seeded_roots = tuple(
            (root.slot, bool(root.shape) or self.draw(st.booleans())) for root in roots
        )
        self.steps.append(steps.Pass(roots[0].home, seeded_roots, retain_graph))

    def finish(self) -> None:
        """Gather on one station, and go backward from what it has."""
        if not any(value.needs_gradient for value in self.values):
            value = self.add(self.station(), needs_gradient=True, is_leaf=True)
            self.steps.append(steps.Parameter(value.home, value.slot, "double"))
        at = self.station()
        chosen = self.some_of(self.where(lambda value: value.needs_gradient), 3)
        of = [
            self.values[slot] for value in chosen for slot in self.fetch_to(at, value)
        ]
        value = self.computed(at, of)
        self.steps.append(steps.Mix(at, value.slot, slots_of(of)))
        self.go_backward([value], retain_graph=self.draw(st.booleans()))


KINDS: Final = ("double", "double", "double", "complex", "bfloat16")

# How often each is tried; what it is about comes first, the simplest first of all.
DRAWN: Final = [
    kind
    for kind, count in (
        (Drawer.parameter, 3),
        (Drawer.mix, 4),
        (Drawer.fetch, 4),
        (Drawer.send, 3),
        (Drawer.relay, 3),
        (Drawer.constant, 1),
        (Drawer.turn, 2),
        (Drawer.rows, 1),
        (Drawer.deaf, 1),
        (Drawer.detach, 1),
        (Drawer.view, 3),
        (Drawer.change, 3),
        (Drawer.hook, 4),
        (Drawer.remote, 3),
        (Drawer.share, 3),
        (Drawer.to_here, 2),
        (Drawer.method, 3),
        (Drawer.backward, 1),
    )
    for _ in range(count)
]


@composite
def programs(draw: DrawFn, workers: int | None = None) -> Program:
    """Draw a program of so many workers; None: of any number."""
    count = draw(st.integers(1, 5)) if workers is None else workers
    drawer = Drawer(draw, count)
    drawer.parameter()
    # A flag before each step, so that shrinking can leave out a step.
    while len(drawer.steps) < STEPS_MAX and draw(GOES_ON):
        draw(st.sampled_from(DRAWN))(drawer)
    drawer.finish()
    return Program(count, tuple(drawer.steps))


GOES_ON: Final = st.sampled_from([False, *[True] * 19])


def any_value(_: Value) -> bool:
    return True


def slots_of(values: Sequence[Value]) -> tuple[int, ...]:
    return tuple(value.slot for value in values)


def takes_clamp(value: Value) -> bool:
    return value.kind != "complex" and not value.gets_sparse


def views_of(value: Value) -> dict[str, tuple[int, ...]]:
    """Return the views that there are of a slot, and their shapes."""
    *before, last = value.shape or (0,)
    shapes: dict[str, tuple[int, ...]] = {}
    if len(value.shape) > 1:
        shapes["transpose"] = (last, *before)
    if value.shape:
        shapes["row"] = value.shape[1:]
    if last > 1:
        shapes["columns"] = (*before, last - 1)
    if value.kind == "complex":
        shapes |= dict.fromkeys(("conj", "imag", "real"), value.shape)
    return shapes
