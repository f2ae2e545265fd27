"""The language of random programs: what a step does, without doing it.

A program runs on stations, one per worker.  Each keeps tensors in numbered slots; no
two slots of a program have the same number.  A step is done by the station `on`, which
may ask others.  A program prints as the expression that makes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, TypeAlias

SHAPE: Final = (2, 3)  # of what steps compute
NAMES: Final = "abcde"
Slots: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class Parameter:
    """A new leaf that requires a gradient; its values follow from its number."""

    on: str
    to: int
    kind: str  # "double", "complex" or "bfloat16"


@dataclass(frozen=True)
class Constant:
    """A new tensor that requires none."""

    on: str
    to: int
    kind: str


@dataclass(frozen=True)
class Mix:
    """A double made of all of `of`, by a function that is linear in none."""

    on: str
    to: int
    of: Slots


@dataclass(frozen=True)
class Turn:
    """The same in another form: "double", "complex", "bfloat16", or their "sum"."""

    on: str
    to: int
    of: int
    into: str


@dataclass(frozen=True)
class Rows:
    """Rows of a table that are looked up, so that its gradient is sparse."""

    on: str
    to: int
    of: int


@dataclass(frozen=True)
class Deaf:
    """The sum of two, of which `value` is given no gradient."""

    on: str
    to: int
    value: int
    other: int


@dataclass(frozen=True)
class Detach:
    """A copy that nothing flows back from."""

    on: str
    to: int
    of: int


@dataclass(frozen=True)
class View:
    """A view: "transpose", "row", "columns", "conj", "real" or "imag"."""

    on: str
    to: int
    of: int
    how: str


@dataclass(frozen=True)
class Change:
    """Change `of` in place: "mul", "add", or only a "part" of it."""

    on: str
    of: int
    by: int
    how: str


@dataclass(frozen=True)
class Hook:
    """Note what goes through, and perhaps change it.

    "look", "double" and "clamp" are hooks of the tensor; "accumulated" and "halve" run
    after a leaf has got its gradient; "before" and "after" are of its node.
    """

    on: str
    of: int
    how: str
    number: int


@dataclass(frozen=True)
class Fetch:
    """Ask `source` for tensors, in one message."""

    on: str
    to: Slots
    source: str
    of: Slots


@dataclass(frozen=True)
class Send:
    """Give tensors to `target`, which keeps them."""

    on: str
    to: Slots
    target: str
    of: Slots


@dataclass(frozen=True)
class Relay:
    """Send tensors through stations by nested calls, and get back what they made.

    Each station of `way` mixes the values with a slot of its own, passes them on to the
    next, and mixes what comes back with it once more.
    """

    on: str
    to: Slots
    way: tuple[tuple[str, int], ...]
    of: Slots


@dataclass(frozen=True)
class Remote:
    """Have `owner` mix `own` slots and tensors of ours, and keep the result there."""

    on: str
    box: int
    owner: str
    own: Slots
    of: Slots


@dataclass(frozen=True)
class Share:
    """Give a reference to another station."""

    on: str
    box: int
    target: str


@dataclass(frozen=True)
class ToHere:
    """Fetch the value of a reference."""

    on: str
    to: int
    box: int


@dataclass(frozen=True)
class Method:
    """Multiply the value of a reference, by its own method, where it is."""

    on: str
    to: int
    box: int
    of: int


@dataclass(frozen=True)
class Pass:
    """Go backward from roots; each says whether it is given a gradient."""

    on: str
    roots: tuple[tuple[int, bool], ...]
    retain_graph: bool


Step: TypeAlias = (
    Parameter
    | Constant
    | Mix
    | Turn
    | Rows
    | Deaf
    | Detach
    | View
    | Change
    | Hook
    | Fetch
    | Send
    | Relay
    | Remote
    | Share
    | ToHere
    | Method
    | Pass
)


@dataclass(frozen=True)
class Program:
    """What stations do, one step after the other.

    Attributes:
        workers: how many stations there are; they are called a, b, ...
        steps: in order.
    """

    workers: int
    steps: tuple[Step, ...]

    @property
    def names(self) -> str:
        """The stations."""
        return NAMES[: self.workers]

    def count(self, kind: type[Any], **fields: Any) -> int:
        """Return how many steps are of a kind, and have these values in fields."""
        return sum(
            type(step) is kind
            and all(getattr(step, name) == value for name, value in fields.items())
            for step in self.steps
        )

    @property
    def is_rounded(self) -> bool:
        """Whether sums in it depend on their order in more than the last bits."""
        return any("bfloat16" in vars(step).values() for step in self.steps)
