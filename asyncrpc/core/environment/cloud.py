"""Variables of launchers that start one command per node: SkyPilot and Kubernetes.

Source: SkyPilot, "Environment variables"; kubernetes-sigs/lws, api/leaderworkerset/v1;
Kubernetes, "Indexed Job for Parallel Processing with Static Work Assignment".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from asyncrpc.core.environment.values import (
    Field,
    LaunchValue,
    Reading,
    Starts,
    Variables,
    port_of_text,
)

SKYPILOT: Final = "SkyPilot"
LEADER_WORKER_SET: Final = "LeaderWorkerSet"
INDEXED_JOB: Final = "indexed Job"
POD_PORT: Final = 29_500  # torchrun's; a pod has all ports to itself


def read_skypilot(environ: Mapping[str, str]) -> Reading | None:
    """Return SkyPilot's values for the node, which is one process."""
    variables = Variables(environ, SKYPILOT)
    rank = variables.take_number(Field.RANK, "SKYPILOT_NODE_RANK")
    addresses = variables.text("SKYPILOT_NODE_IPS").split()
    if rank is None:
        return None
    variables.take_number(Field.NODE, "SKYPILOT_NODE_RANK")
    variables.take_number(Field.WORLD_SIZE, "SKYPILOT_NUM_NODES")
    variables.take_number(Field.NODES, "SKYPILOT_NUM_NODES")
    if addresses:
        first = LaunchValue(
            Field.HOST, addresses[0], "the first of SKYPILOT_NODE_IPS", SKYPILOT
        )
        variables.values.append(first)
    if run := variables.take_text(Field.RUN_ID, "SKYPILOT_TASK_ID"):
        port = port_of_text(run)
        variables.add(Field.PORT, port, "SKYPILOT_TASK_ID", is_derived=True)
    return variables.reading(Starts.NODES)


def read_leader_worker_set(environ: Mapping[str, str]) -> Reading | None:
    """Return a LeaderWorkerSet's values for the pod, which is one process."""
    variables = Variables(environ, LEADER_WORKER_SET)
    variables.take_number(Field.RANK, "LWS_WORKER_INDEX")
    variables.take_number(Field.WORLD_SIZE, "LWS_GROUP_SIZE")
    variables.take_number(Field.NODE, "LWS_WORKER_INDEX")
    variables.take_number(Field.NODES, "LWS_GROUP_SIZE")
    if variables.take_text(Field.HOST, "LWS_LEADER_ADDRESS"):
        names = ("LWS_LEADER_ADDRESS",)
        variables.add(Field.PORT, POD_PORT, *names, is_derived=True)
    return variables.reading(Starts.NODES)


def read_indexed_job(environ: Mapping[str, str]) -> Reading | None:
    """Return an indexed Job's values for the pod; the Job may be part of a JobSet.

    It tells neither the number of pods nor their names.
    """
    variables = Variables(environ, INDEXED_JOB)
    rank = variables.take_number(Field.RANK, "JOB_COMPLETION_INDEX")
    if rank is None:
        return None
    variables.take_number(Field.NODE, "JOB_COMPLETION_INDEX")
    variables.take_number(Field.RESTART, "JOBSET_RESTART_ATTEMPT")
    variables.add(Field.PORT, POD_PORT, "JOB_COMPLETION_INDEX", is_derived=True)
    hint = (
        "an indexed Job gives only its index: set WORLD_SIZE to its completions and "
        "MASTER_ADDR to <job>-0.<headless service> in the pod's template"
    )
    return variables.reading(Starts.NODES, hint)
