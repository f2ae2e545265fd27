"""A function that workers of policy STRICT know, and do not let anybody call."""

from __future__ import annotations

from tests.chaos.called import begin


def unexposed(call_id: str) -> str:
    begin(call_id)
    return call_id
