"""A public number of time says its unit: a parameter or field of seconds ends in `_s`.

Found by name, and by description: what a docstring calls seconds is one of them.
`asyncrpc.compat` has torch's own names.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.architecture.public import described

# Words that name a time unless a unit, a count or a flag follows.
TIMES = {
    "age",
    "delay",
    "duration",
    "grace",
    "heartbeat",
    "interval",
    "patience",
    "seconds",
    "timeout",
    "ttl",
}
# In an entry of a docstring: `name: seconds that ...`, `name: ...; in seconds`.
SECONDS = re.compile(r"^(seconds\b|how many seconds|.*\bin seconds\b)", re.IGNORECASE)
ENTRY = re.compile(r"^\s{4,}(\w+): (.+)$")
# Not a number: it holds its own unit.
UNITLESS = ("timedelta", "Span")

OBJECTS = described()


def names_of(public: Any) -> Iterator[str]:
    """Yield the parameters of a function, or the fields of a record."""
    if inspect.isclass(public):
        if dataclasses.is_dataclass(public):
            for field in dataclasses.fields(public):
                if not field.name.startswith("_"):
                    yield field.name
            return
        public = vars(public).get("__init__")
    if not inspect.isfunction(public):
        return
    for parameter in inspect.signature(public).parameters.values():
        if not str(parameter.annotation).startswith(UNITLESS):
            yield parameter.name


def called_seconds(public: Any) -> Iterator[str]:
    """Yield what a docstring lists and calls seconds."""
    documents = [public]
    if inspect.isclass(public):
        documents.append(vars(public).get("__init__"))
    for document in documents:
        for line in (getattr(document, "__doc__", None) or "").splitlines():
            entry = ENTRY.match(line)
            if entry and SECONDS.match(entry[2]):
                yield entry[1]


def is_time_without_unit(name: str) -> bool:
    return name.rpartition("_")[2] in TIMES


@pytest.mark.parametrize(("name", "public"), OBJECTS, ids=[name for name, _ in OBJECTS])
def test_public_time_has_its_unit(name: str, public: Any) -> None:
    assert [name for name in names_of(public) if is_time_without_unit(name)] == []


@pytest.mark.parametrize(("name", "public"), OBJECTS, ids=[name for name, _ in OBJECTS])
def test_parameters_in_seconds_end_in_their_unit(name: str, public: Any) -> None:
    assert [
        parameter
        for parameter in called_seconds(public)
        if not parameter.endswith("_s")
    ] == []


def test_times_are_found() -> None:
    def wait(timeout: float, rpc_timeout: float, timeout_s: float) -> None:
        """Wait.

        Args:
            timeout: how long.
            patience: seconds that it may take.
            sleep: how long it sleeps, in seconds.
            timeout_s: seconds.
        """

    names = [name for name in names_of(wait) if is_time_without_unit(name)]
    assert names == ["timeout", "rpc_timeout"]
    assert list(called_seconds(wait)) == ["patience", "sleep", "timeout_s"]
