"""The values of one launcher, each with its origin."""

from __future__ import annotations

import enum
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from asyncrpc.errors import UsageError

Content: TypeAlias = int | str | bool

# Below the ports that Linux hands out by itself (32768 to 60999), above the services.
_FIRST_PORT: Final = 15_000
_PORTS: Final = 17_000
_STEPS: Final = 16  # of one job that have ports of their own at the same time
PORT_MAX: Final = 65_535


class Field(enum.Enum):
    """The facts about a process, with their names in messages."""

    RANK = "rank"
    WORLD_SIZE = "world_size"
    LOCAL_RANK = "local_rank"
    LOCAL_WORLD_SIZE = "local_world_size"
    NODE = "node"
    NODES = "nodes"
    HOST = "host"
    PORT = "port"
    AGENT_STORE = "agent_store"
    RESTART = "restart"
    RUN_ID = "run_id"
    NAME = "name"


class Starts(enum.Enum):
    """What a launcher starts, as its variables tell."""

    PROCESSES = "every process"
    NODES = "one command per node"
    NOTHING = "nothing: variables that were set by hand, or an allocation"


@dataclass(frozen=True, slots=True)
class LaunchValue:
    """One value and its origin.

    Attributes:
        content: a number, a text or a flag.
        origin: the variable with its text, such as `SLURM_PROCID=3`.
        is_derived: whether it was computed from variables with another meaning.  A
            value that is stated takes precedence over it.
    """

    field: Field
    content: Content
    origin: str
    launcher: str
    is_derived: bool = False


@dataclass(frozen=True, slots=True)
class Reading:
    """All values of one launcher.

    Attributes:
        starts: what it has started.
        hint: what to do if they are not enough; empty if they are.
    """

    launcher: str
    starts: Starts
    values: tuple[LaunchValue, ...]
    hint: str = ""

    def get(self, field: Field) -> LaunchValue | None:
        """Return the value of a field, or None."""
        return next((value for value in self.values if value.field is field), None)


class Variables:
    """The variables of one launcher, read one by one into values."""

    def __init__(self, environ: Mapping[str, str], launcher: str) -> None:
        self._environ = environ
        self._launcher = launcher
        self.values: list[LaunchValue] = []

    def text(self, *names: str) -> str:
        """Return the first of these variables that is not empty, or an empty text."""
        return next((value for name in names if (value := self._of(name))), "")

    def number(self, *names: str, at_most: int | None = None) -> int | None:
        """Return the number in the first of these variables that is set, or None."""
        for name in names:
            if text := self._of(name):
                return whole_number(name, text, at_most=at_most)
        return None

    def take_number(
        self, field: Field, *names: str, at_most: int | None = None
    ) -> int | None:
        """Add the number in the first of these variables as a value; return it."""
        number = self.number(*names, at_most=at_most)
        if number is not None:
            self._add(field, number, *names)
        return number

    def take_text(self, field: Field, *names: str) -> str:
        """Add the text of the first of these variables as a value; return it."""
        text = self.text(*names)
        if text:
            self._add(field, text, *names)
        return text

    def add(
        self, field: Field, content: Content, *names: str, is_derived: bool = False
    ) -> None:
        """Add a value that was found in these variables."""
        origin = " and ".join(f"{name}={self._of(name)}" for name in names if name)
        value = LaunchValue(field, content, origin, self._launcher, is_derived)
        self.values.append(value)

    def reading(self, starts: Starts, hint: str = "") -> Reading | None:
        """Return the values found; None if there are none."""
        if not self.values and not hint:
            return None
        return Reading(self._launcher, starts, tuple(self.values), hint)

    def _of(self, name: str) -> str:
        return self._environ.get(name, "").strip()

    def _add(self, field: Field, content: Content, *names: str) -> None:
        self.add(field, content, next(name for name in names if self._of(name)))


def whole_number(name: str, text: str, *, at_most: int | None = None) -> int:
    """Return the number that a variable holds."""
    is_number = text.isascii() and text.isdecimal()
    if is_number and (at_most is None or int(text) <= at_most):
        return int(text)
    most = "" if at_most is None else f" and at most {at_most}"
    raise UsageError(
        f"the variable {name} must be a number of at least 0{most}, not {text!r}"
    )


def port_of_job(job: int, step: int = 0) -> int:
    """Return the port at which the processes of a job's step meet.

    Jobs with consecutive numbers, and the first steps of one job, have different ports.
    """
    return _FIRST_PORT + (job * _STEPS + step % _STEPS) % _PORTS


def port_of_text(text: str) -> int:
    """Return the port at which the processes of a run with this name meet."""
    return _FIRST_PORT + zlib.crc32(text.encode()) % _PORTS


def spoken(words: Sequence[str]) -> str:
    """Return words as a sentence lists them: `a, b and c`."""
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last
