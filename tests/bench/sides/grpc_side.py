"""grpc.aio: a generic handler with a method for each function, and bytes as messages.

A tensor travels as its bytes and nothing else: both ends know that it is a vector of
float32.  So there is no protocol buffer, and no compiler of them, between.

Source: https://grpc.github.io/grpc/python/grpc_asyncio.html.
"""

from __future__ import annotations

import asyncio
import pickle
import sys
import warnings
from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc
import grpc.aio
import torch
import uvloop

from tests.bench import workloads as w
from tests.bench.sides import awaiting
from tests.bench.sides.side import Arguments, start

STOP: Final = "stop"
SERVICE: Final = "bench"
# Without a limit for a message, and with the largest frames that HTTP/2 has.
OPTIONS: Final = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.http2.max_frame_size", (1 << 24) - 1),
]


def tensor_to_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()


def tensor_from_bytes(data: bytes) -> torch.Tensor:
    return torch.frombuffer(data, dtype=torch.float32)


# How the argument and the result of a function travel: each a way there and a way back.
TENSOR: Final = (tensor_to_bytes, tensor_from_bytes)
PICKLE: Final = (pickle.dumps, pickle.loads)
FUNCTIONS: Final = {
    "nothing_async": (PICKLE, PICKLE),
    "shape_of": (TENSOR, PICKLE),
    "echo": (TENSOR, TENSOR),
    STOP: (PICKLE, PICKLE),
}


def handlers(stop: asyncio.Event) -> grpc.GenericRpcHandler:
    """Return what the server answers with."""
    functions: dict[str, Callable[..., Any]] = {
        STOP: stop.set,
        **{name: getattr(w, name) for name in FUNCTIONS if name != STOP},
    }

    def answer(function: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
        async def run(argument: Any, _context: grpc.aio.ServicerContext) -> Any:
            result = function() if argument is None else function(argument)
            return await result if asyncio.iscoroutine(result) else result

        return run

    methods = {
        name: grpc.unary_unary_rpc_method_handler(
            answer(functions[name]), there[1], back[0]
        )
        for name, (there, back) in FUNCTIONS.items()
    }
    return grpc.method_handlers_generic_handler(SERVICE, methods)


async def serve(address: str) -> None:
    stop = asyncio.Event()
    server = grpc.aio.server(options=OPTIONS)
    server.add_generic_rpc_handlers([handlers(stop)])
    server.add_insecure_port(address)
    await server.start()
    await stop.wait()
    await server.stop(grace=1)


async def main(arguments: Arguments) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "The given buffer is not writable")
    address = (
        f"127.0.0.1:{arguments.port}"
        if arguments.kind == "tcp"
        else f"unix-abstract:asyncrpc-bench-{arguments.port}"
    )
    if arguments.rank:
        await serve(address)
        return
    async with grpc.aio.insecure_channel(address, OPTIONS) as channel:
        methods = {
            name: channel.unary_unary(f"/{SERVICE}/{name}", there[0], back[1])
            for name, (there, back) in FUNCTIONS.items()
        }

        def call(function: str, argument: Any = None) -> Any:
            return methods[function](argument, wait_for_ready=True)

        await awaiting.lead(awaiting.measured(call), arguments)
        await call(STOP)


if __name__ == "__main__":
    sys.exit(start(lambda arguments: uvloop.run(main(arguments))))
