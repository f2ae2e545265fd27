"""What a check has found."""

from __future__ import annotations

import enum
from typing import Annotated, NamedTuple

from asyncrpc.core.services.schema import EnumName


class CheckState(enum.Enum):
    """The result of a check."""

    OK = "ok"
    NOTE = "note"  # it works, but could be better, or may fail later
    WRONG = "wrong"  # it fails, or gives access to others


class CheckFinding(NamedTuple):
    """What a check has found.

    Attributes:
        found: the facts, in a few words.
        advice: what to do; empty: nothing.
    """

    check: str
    state: Annotated[CheckState, EnumName(CheckState)]
    found: str
    advice: str = ""


def ok(check: str, observation: str) -> CheckFinding:
    """Return the finding that all is well."""
    return CheckFinding(check, CheckState.OK, observation)


def note(check: str, observation: str, advice: str) -> CheckFinding:
    """Return a finding that something could be better."""
    return CheckFinding(check, CheckState.NOTE, observation, advice)


def wrong(check: str, observation: str, advice: str) -> CheckFinding:
    """Return a finding that something is wrong."""
    return CheckFinding(check, CheckState.WRONG, observation, advice)
