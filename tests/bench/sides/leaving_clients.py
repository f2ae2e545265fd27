"""Clients in a process of their own, which leave at random moments.

They know HTTP as far as they must, so that the process is not what is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from typing import Final, NamedTuple

from asyncrpc.core.loop.clock import now_s

WITHIN_S: Final = 3.0
UNANSWERED_S: Final = 1.0  # by then all wait that are not answered


class Client(NamedTuple):
    path: str  # that it asks for
    is_answered: bool  # whether it waits for the first bytes of the answer
    after_s: float  # seconds that it stays then
    resets: bool  # whether it leaves by a reset


async def read_all(reader: asyncio.StreamReader) -> None:
    while await reader.read(1 << 16):
        pass


async def leave(port: int, client: Client) -> float:
    """Ask, read for so many seconds, and leave; return when that was."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {client.path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    if client.is_answered:
        await reader.readuntil(b"\n\n")  # the first event
    else:
        await asyncio.sleep(UNANSWERED_S)
    reading = asyncio.ensure_future(read_all(reader))
    await asyncio.sleep(client.after_s)
    left_s = now_s()
    if client.resets:
        writer.transport.abort()
    else:
        writer.close()
    await asyncio.gather(reading, return_exceptions=True)
    return left_s


async def main(port: int, path: str, count: int, seed: int) -> dict[str, float]:
    draw = random.Random(seed)
    names = [f"{seed}-{number}" for number in range(count)]
    leaving = [
        leave(
            port,
            Client(
                f"{path}?name={name}",
                is_answered=path == "/tokens",
                after_s=draw.uniform(0.0, WITHIN_S),
                resets=draw.random() < 0.5,
            ),
        )
        for name in names
    ]
    left_s = await asyncio.gather(*leaving)
    return dict(zip(names, left_s, strict=True))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for option in ("--port", "--count", "--seed"):
        parser.add_argument(option, type=int, required=True)
    parser.add_argument("--path", required=True)
    chosen = parser.parse_args()
    print(json.dumps(asyncio.run(main(**vars(chosen)))))
