"""asyncrpc's facade: the rival's program, with another module under torch's names.

Its figures stand in asyncrpc's column, in starts of the kind `facade`.
"""

from __future__ import annotations

import sys
from functools import partial

import torch

import asyncrpc
from asyncrpc.compat import rpc
from asyncrpc.compat.rpc import starting
from tests.bench.sides import blocking
from tests.bench.sides.side import Arguments, start


def main(arguments: Arguments) -> None:
    torch.set_num_threads(1)
    if arguments.spin:  # torch's options have no place for it
        network = asyncrpc.NetworkOptions(spin=arguments.spin)
        options = partial(asyncrpc.Options, network=network)
        starting.Options = options  # type: ignore[assignment,attr-defined]
    rpc.init_rpc(
        arguments.name,
        rank=arguments.rank,
        world_size=arguments.processes,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(
            init_method=f"tcp://127.0.0.1:{arguments.port}"
        ),
    )
    if arguments.rank == 0:
        blocking.lead(blocking.measured(blocking.facade_names()), arguments)
    rpc.shutdown()


if __name__ == "__main__":
    sys.exit(start(main))
