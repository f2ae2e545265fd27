"""What is known of each test before it runs: its class, and what need not pass.

Three files beside this one.  `classification.json` has the class of every test:

    a   the documented API and its behaviour, nothing else
    b   also private names that the facade can offer, or the wording of a C++ binding
    c   torch's C++, and after a blank which part of it: nothing outside of torch has it
    g   what needs one GPU, and skips itself elsewhere: `make test-cuda` runs it

`expected.toml` has the tests of classes b, c and g that need not pass, with a reason
each.  `ci.txt` has those that `make test` runs.  Nothing here imports torch or the
facade.
"""

from __future__ import annotations

import enum
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).parent
CI: Final = HERE / "ci.txt"


class Class(enum.StrEnum):
    A = "a"
    B = "b"
    C = "c"
    G = "g"


@dataclass(frozen=True, slots=True)
class Known:
    name: str  # "SUITE.TEST"; the same for every implementation.
    suite: str  # the class of `torch.testing._internal.distributed` that has it.
    of_class: Class
    kind: str  # what of torch's C++ a test of class c is about; "" for the others


def classified() -> dict[str, Known]:
    """Return every test by its name, in the order of a run."""
    written: dict[str, dict[str, str]] = json.loads(
        (HERE / "classification.json").read_text("utf-8")
    )
    known: dict[str, Known] = {}
    for suite, tests in written.items():
        for test, said in tests.items():
            of_class, _, kind = said.partition(" ")
            name = f"{suite}.{test}"
            known[name] = Known(name, suite, Class(of_class), kind)
    return known


def not_expected(
    known: Mapping[str, Known], path: Path = HERE / "expected.toml"
) -> dict[str, str]:
    """Return the tests that need not pass, with the reason of each."""
    listed: dict[str, str] = {}
    for said, tests in tomllib.loads(path.read_text("utf-8")).items():
        if said not in {Class.B, Class.C, Class.G}:
            raise ValueError(
                f"[{said}]: only tests of classes b, c and g can be listed"
            )
        for name, reason in tests.items():
            if name not in known or known[name].of_class != said:
                raise ValueError(f"{name} is no test of class {said}")
            if not reason.strip():
                raise ValueError(f"{name} has no reason")
            listed[name] = reason
    return listed


def names_in(path: Path) -> list[str]:
    """Return the tests that a file names, one a line; `#` begins a comment."""
    lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
    return [line for line in lines if line]
