"""pyzmq: a ROUTER and a DEALER socket, and a few lines that make calls of messages.

A message is a pickle of protocol 5 and the tensors beside it, as frames of their own
that are neither copied when they are sent nor when they have come.

Source: https://pyzmq.readthedocs.io/en/latest/howto/serialization.html.
"""

from __future__ import annotations

import asyncio
import contextlib
import copyreg
import itertools
import pickle
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

import torch
import uvloop
import zmq
import zmq.asyncio

from tests.bench import workloads as w
from tests.bench.sides import awaiting
from tests.bench.sides.side import Arguments, start

STOP: Final = "stop"
AT_A_TIME: Final = 64  # messages; then others on the loop have a turn


def reduce_tensor(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Pickle a tensor as an array, which has its memory beside the pickle."""
    return torch.from_numpy, (tensor.numpy(),)


copyreg.pickle(torch.Tensor, reduce_tensor)


def pack(*message: Any) -> list[Any]:
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(message, 5, buffer_callback=buffers.append)
    return [head, *buffers]


def unpack(frames: Sequence[zmq.Frame]) -> Any:
    head, *buffers = frames
    return pickle.loads(head.buffer, buffers=[buffer.buffer for buffer in buffers])


async def messages(socket: zmq.asyncio.Socket) -> AsyncIterator[list[zmq.Frame]]:
    """Wait for a message, then take what else is there already, some at a time."""
    without_waiting = zmq.Socket.shadow(socket)
    while True:
        yield await socket.recv_multipart(copy=False)
        with contextlib.suppress(zmq.Again):
            for _ in range(AT_A_TIME):
                yield without_waiting.recv_multipart(zmq.DONTWAIT, copy=False)


class Client:
    """Sends requests with numbers, and gives each answer to who awaits it."""

    def __init__(self, socket: zmq.asyncio.Socket) -> None:
        self._socket = socket
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Future[Any]] = {}

    def call(self, function: str, *args: Any) -> asyncio.Future[Any]:
        """Start a call; it is sent at once, or when the socket has room."""
        number = next(self._numbers)
        answer = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        self._socket.send_multipart(pack(number, function, args), copy=False)
        return answer

    async def listen(self) -> None:
        async for frames in messages(self._socket):
            number, result = unpack(frames)
            self._answers.pop(number).set_result(result)


async def serve(socket: zmq.asyncio.Socket) -> None:
    """Answer calls until one says that it was the last.

    A coroutine function has a task of its own, so that one that waits holds up none.
    """
    tasks: set[asyncio.Task[None]] = set()

    async def answer(caller: zmq.Frame, number: int, result: Any) -> None:
        if asyncio.iscoroutine(result):
            result = await result
        await socket.send_multipart([caller, *pack(number, result)], copy=False)

    async for caller, *frames in messages(socket):
        number, function, args = unpack(frames)
        if function == STOP:
            await answer(caller, number, None)
            return
        result = getattr(w, function)(*args)
        if asyncio.iscoroutine(result):
            task = asyncio.create_task(answer(caller, number, result))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        else:
            await answer(caller, number, result)


async def main(arguments: Arguments) -> None:
    torch.set_num_threads(1)
    address = (
        f"tcp://127.0.0.1:{arguments.port}"
        if arguments.kind == "tcp"
        else f"ipc://@asyncrpc-bench-{arguments.port}"
    )
    kind = zmq.ROUTER if arguments.rank else zmq.DEALER
    with zmq.asyncio.Context() as context, context.socket(kind) as socket:
        socket.set_hwm(0)
        if arguments.rank:
            socket.bind(address)
            await serve(socket)
            return
        socket.connect(address)
        client = Client(socket)
        listening = asyncio.create_task(client.listen())
        await awaiting.lead(awaiting.measured(client.call), arguments)
        await client.call(STOP)
        listening.cancel()


if __name__ == "__main__":
    sys.exit(start(lambda arguments: uvloop.run(main(arguments))))
