"""torchrun's variables, which `asyncrpc run` and users set as well.

Source: torch/distributed/run.py, "Environment Variables".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from asyncrpc.core.environment.values import PORT_MAX, Field, Reading, Starts, Variables

TORCHRUN: Final = "torchrun"
OURS: Final = "asyncrpc run"
BY_HAND: Final = "torchrun's variables, set by hand"
NAMES: Final = (TORCHRUN, OURS, BY_HAND)
LAUNCHER_VARIABLE: Final = "ASYNCRPC_LAUNCHER"
RUN_VARIABLE: Final = "ASYNCRPC_RUN_ID"
_NO_NAME: Final = "none"  # torchrun's default for --rdzv-id, of all runs


def read(environ: Mapping[str, str]) -> Reading | None:
    """Return the values of torchrun, or of a user who set its variables."""
    is_torchrun = bool(environ.get("TORCHELASTIC_RUN_ID"))
    is_ours = bool(environ.get(LAUNCHER_VARIABLE))
    name = OURS if is_ours else TORCHRUN if is_torchrun else BY_HAND
    variables = Variables(environ, name)
    rank = variables.take_number(Field.RANK, "RANK")
    size = variables.take_number(Field.WORLD_SIZE, "WORLD_SIZE")
    variables.take_number(Field.LOCAL_RANK, "LOCAL_RANK")
    variables.take_number(Field.LOCAL_WORLD_SIZE, "LOCAL_WORLD_SIZE")
    variables.take_number(Field.NODE, "GROUP_RANK")
    variables.take_number(Field.NODES, "GROUP_WORLD_SIZE")
    variables.take_text(Field.HOST, "MASTER_ADDR")
    variables.take_number(Field.PORT, "MASTER_PORT", at_most=PORT_MAX)
    is_served = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if is_served:
        variables.add(Field.AGENT_STORE, True, "TORCHELASTIC_USE_AGENT_STORE")  # noqa: FBT003
    variables.take_number(Field.RESTART, "TORCHELASTIC_RESTART_COUNT")
    if environ.get(RUN_VARIABLE):
        variables.take_text(Field.RUN_ID, RUN_VARIABLE)
    elif environ.get("TORCHELASTIC_RUN_ID") != _NO_NAME:
        variables.take_text(Field.RUN_ID, "TORCHELASTIC_RUN_ID")
    has_place = rank is not None and size is not None
    is_started = has_place and (is_torchrun or is_ours or is_served)
    return variables.reading(Starts.PROCESSES if is_started else Starts.NOTHING)
