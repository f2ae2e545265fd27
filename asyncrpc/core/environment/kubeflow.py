"""Kubeflow's variables, from which torchrun takes its options; one pod per node.

Source: kubeflow/trainer, pkg/runtime/framework/plugins/torch; torchrun reads
`PET_<OPTION>` (torch/distributed/argparse_util.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from asyncrpc.core.environment.values import PORT_MAX, Field, Reading, Starts, Variables

KUBEFLOW: Final = "Kubeflow"


def read(environ: Mapping[str, str]) -> Reading | None:
    """Return Kubeflow's values for the pod, which is one process."""
    variables = Variables(environ, KUBEFLOW)
    processes = variables.text("PET_NPROC_PER_NODE")
    # "auto", "cpu" and "gpu" are for torchrun to count.
    is_one = not processes.isdecimal() or int(processes) == 1
    node = variables.take_number(Field.NODE, "PET_NODE_RANK")
    nodes = variables.text("PET_NNODES")
    # Elastic jobs say 1:4; then torchrun alone knows how many there are.
    is_fixed = nodes.isdecimal()
    if is_fixed:
        variables.take_number(Field.NODES, "PET_NNODES")
    if is_one and node is not None:
        variables.take_number(Field.RANK, "PET_NODE_RANK")
        if is_fixed:
            variables.take_number(Field.WORLD_SIZE, "PET_NNODES")
        variables.add(Field.LOCAL_RANK, 0, "PET_NODE_RANK", is_derived=True)
        variables.add(Field.LOCAL_WORLD_SIZE, 1, "PET_NODE_RANK", is_derived=True)
    variables.take_text(Field.HOST, "PET_MASTER_ADDR")
    variables.take_number(Field.PORT, "PET_MASTER_PORT", at_most=PORT_MAX)
    variables.take_text(Field.RUN_ID, "PET_RDZV_ID")
    hint = ""
    if not is_one:
        hint = (
            f"PET_NPROC_PER_NODE={processes} asks for several processes in each pod: "
            "start the program by torchrun, which reads it"
        )
    elif nodes and not is_fixed:
        hint = (
            f"PET_NNODES={nodes} leaves the number of nodes open: start the program by "
            "torchrun, which finds it out"
        )
    return variables.reading(Starts.NODES, hint)
