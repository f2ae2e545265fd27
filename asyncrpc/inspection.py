"""Looks into running workers: tasks, threads, calls, and why they wait."""

from typing import TYPE_CHECKING

from asyncrpc.core.on_demand import names_on_demand

if TYPE_CHECKING:
    from asyncrpc.tools.inspection.asking import why
else:
    __getattr__, __dir__ = names_on_demand(
        __name__, {"why": "asyncrpc.tools.inspection.asking"}
    )

__all__ = ["why"]
