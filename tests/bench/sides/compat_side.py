"""asyncrpc's facade: the rival's program, with another module under torch's names.

Its figures stand in asyncrpc's column, in starts of the kind `facade`.
"""

from __future__ import annotations

import sys
import traceback

import torch

from asyncrpc.compat import rpc
from tests.bench.processes import report
from tests.bench.sides import blocking
from tests.bench.sides.side import Arguments, parse, reason_of


def main(arguments: Arguments) -> None:
    torch.set_num_threads(1)
    rpc.init_rpc(
        arguments.name,
        rank=arguments.rank,
        world_size=arguments.processes,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(
            init_method=f"tcp://127.0.0.1:{arguments.port}"
        ),
    )
    if arguments.rank == 0:
        blocking.lead(blocking.measured(rpc), arguments)
    rpc.shutdown()


def start() -> int:
    """Run this process; if it cannot begin, say so for each of its workloads."""
    arguments = parse()
    try:
        main(arguments)
    except Exception as error:  # noqa: BLE001  (it is reported)
        traceback.print_exc(file=sys.stderr)
        if arguments.rank == 0:
            report("", [], f"the start failed: {reason_of(error)}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(start())
