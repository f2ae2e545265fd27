"""What a run found: one result for each test, and a file of them.

Knows neither how tests are run nor which of them must pass.
"""

from __future__ import annotations

import enum
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


class Status(enum.StrEnum):
    PASS = "pass"
    SKIP = "skip"  # by the test itself
    FAIL = "fail"
    TIMEOUT = "timeout"


GOOD = frozenset({Status.PASS, Status.SKIP})


@dataclass(frozen=True, slots=True)
class Result:
    status: Status
    message: str = ""  # the exception's last line, or why it was skipped
    seconds: float = 0.0  # what it took, the start of its ranks included
    # One for each rank; PyTorch looks at the first alone.
    exit_codes: tuple[int | None, ...] = ()
    # Names that were used and that the implementation has not.
    missing: tuple[str, ...] = ()
    leaked: tuple[str, ...] = ()  # entry points of torch's own RPC that were reached
    flaky: bool = False  # it passed only when it was run again
    detail: str = ""  # the end of what unittest says about a failure

    @property
    def is_good(self) -> bool:
        return self.status in GOOD

    @classmethod
    def from_json(cls, written: Mapping[str, Any]) -> Result:
        lists = {
            name: tuple(written.get(name, ()))
            for name in ("exit_codes", "missing", "leaked")
        }
        return cls(**{**written, **lists, "status": Status(written["status"])})


@dataclass(frozen=True, slots=True)
class Report:
    about: Mapping[str, Any]  # with what it was run, and when
    results: Mapping[str, Result]

    def write(self, path: Path) -> None:
        """Write a file that is whole at any moment."""
        written = {
            "about": self.about,
            "summary": summary(self.results.values()),
            "tests": {name: shortened(result) for name, result in self.results.items()},
        }
        part = path.with_name(path.name + ".part")
        part.write_text(json.dumps(written, indent=1) + "\n", "utf-8")
        part.replace(path)

    @classmethod
    def read(cls, path: Path) -> Report:
        written = json.loads(path.read_text("utf-8"))
        tests = written["tests"].items()
        return cls(
            written["about"], {name: Result.from_json(result) for name, result in tests}
        )


def shortened(result: Result) -> dict[str, Any]:
    return {name: value for name, value in asdict(result).items() if value}


def summary(results: Iterable[Result]) -> dict[str, int]:
    """Count results by status; `flaky` ones are among those that pass."""
    kept = list(results)
    counted = Counter(str(result.status) for result in kept)
    flaky = sum(result.flaky for result in kept)
    return {**dict(sorted(counted.items())), "flaky": flaky, "total": len(kept)}
