"""The placement of a process: its rank and the like, as far as they are known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from asyncrpc.core.environment.values import Field, LaunchValue, Reading, Starts, spoken
from asyncrpc.errors import UsageError

IN_CODE: Final = "the program"
_STARTERS: Final = (
    "torchrun, `asyncrpc run`, srun and mpirun set what is needed; `asyncrpc doctor` "
    "shows what is there"
)


@dataclass(frozen=True, slots=True)
class GivenPlace:
    """The values that the program gives in code, which override all variables.

    Attributes:
        rank: of this process; None leaves it to the environment.
        world_size: number of processes, or None.
        name: of the worker, or None.
    """

    rank: int | None = None
    world_size: int | None = None
    name: str | None = None

    def reading(self) -> Reading | None:
        """Internal: return these values like those of a launcher."""
        contents = {
            Field.RANK: self.rank,
            Field.WORLD_SIZE: self.world_size,
            Field.NAME: self.name,
        }
        values = tuple(
            LaunchValue(field, content, f"{field.value}={content!r}", IN_CODE)
            for field, content in contents.items()
            if content is not None
        )
        return Reading(IN_CODE, Starts.NOTHING, values) if values else None


@dataclass(frozen=True, slots=True)
class LaunchPlacement:
    """The known facts about this process, each value with its origin.

    Attributes:
        values: by field; without unknown fields.
        launcher: what started the processes; "" if that is not known.
        is_started: whether the launcher started every process, not one command a node.
        outer: launchers around it, which count nodes or describe the allocation.
        hints: what to do if something is missing.
    """

    values: Mapping[Field, LaunchValue] = field(default_factory=dict)
    launcher: str = ""
    is_started: bool = False
    outer: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()

    @property
    def rank(self) -> int | None:
        """Index of this process."""
        return self._number(Field.RANK)

    @property
    def world_size(self) -> int | None:
        """Number of processes."""
        return self._number(Field.WORLD_SIZE)

    @property
    def local_rank(self) -> int | None:
        """Index of this process on its host."""
        return self._number(Field.LOCAL_RANK)

    @property
    def local_world_size(self) -> int | None:
        """Number of processes on this host."""
        return self._number(Field.LOCAL_WORLD_SIZE)

    @property
    def host(self) -> str | None:
        """Host of the meeting point."""
        value = self.values.get(Field.HOST)
        return None if value is None else str(value.content)

    @property
    def port(self) -> int | None:
        """Port of the meeting point."""
        return self._number(Field.PORT)

    @property
    def is_served(self) -> bool:
        """Whether the launcher hosts the store, so that rank 0 does not."""
        return Field.AGENT_STORE in self.values

    @property
    def run_id(self) -> str:
        """Name of this run of the program, different from that of any other run.

        Empty if it is not known, or if the launcher hosts the store: then it restarts
        all workers or none.
        """
        value = self.values.get(Field.RUN_ID)
        return "" if value is None or self.is_served else str(value.content)

    @property
    def restart(self) -> int:
        """How often the launcher has started this process before."""
        return self._number(Field.RESTART) or 0

    @property
    def name(self) -> str | None:
        """Name of this worker: as given, else by its rank."""
        value = self.values.get(Field.NAME)
        return None if value is None else str(value.content)

    def require_number(self, wanted: Field, variable: str) -> int:
        """Return a number that must be known."""
        number = self._number(wanted)
        if number is None:
            raise UsageError(
                f"{wanted.value} is missing: pass {wanted.value}=..., or set {variable}"
                f" and use the rendezvous env:// ({self.advice()})"
            )
        return number

    def require_address(self) -> tuple[str, int]:
        """Return host and port of the meeting point."""
        host, port = self.host, self.port
        if host is None or port is None:
            names = ("MASTER_ADDR", "MASTER_PORT")
            pairs = zip(names, (host, port), strict=True)
            missing = [name for name, known in pairs if known is None]
            raise UsageError(f"env:// needs {spoken(missing)} ({self.advice()})")
        return host, port

    def advice(self) -> str:
        """Return what to do if something is missing."""
        return "; ".join(self.hints) or _STARTERS

    def _number(self, wanted: Field) -> int | None:
        value = self.values.get(wanted)
        return None if value is None else int(value.content)
