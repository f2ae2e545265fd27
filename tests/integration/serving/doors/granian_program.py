"""An application on granian, in a process of its own.

Its threads, which are Rust's, stay for a while after it has ended, so it is no guest of
a process that must leave nothing behind.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from fastapi.responses import FileResponse
from granian.constants import Interfaces
from granian.server.embed import Server
from starlette.background import BackgroundTask

import asyncrpc
from asyncrpc import LocalRendezvous, Worker, current_worker
from asyncrpc.serving.asgi.machine.connection import AsgiApplication
from tests.integration.serving import remote
from tests.integration.serving.doors.applications import fastapi_app
from tests.integration.serving.doors.conftest import ITEM_LENGTH
from tests.integration.serving.doors.neutral import Asked, NeutralApp

NAME = "granian"


def there(function: Any, *args: Any) -> Any:
    return current_worker().peer("front").stream(function, *args)


async def wait_here(asked: Asked) -> Any:
    await asyncrpc.rpc_async("front", remote.wait_forever, args=(NAME,))


async def refuse(asked: Asked) -> Any:
    await asyncrpc.rpc_async("front", remote.overload)


async def next_ended(asked: Asked) -> Any:
    """Answer when what the clients wait for has ended; it may begin again then."""
    watch = remote.watches[NAME]
    await watch.cancelled.wait()
    watch.begun.clear()
    watch.cancelled.clear()
    return True


async def next_begun(asked: Asked) -> Any:
    return await remote.watches[NAME].begun.wait()


async def produced(asked: Asked) -> Any:
    return remote.watches[NAME].produced


async def echo(messages: AsyncIterator[str | bytes]) -> AsyncIterator[Any]:
    async for message in messages:
        yield message


class AfterFile:
    """What a handler does after it has sent a file, by the server's `pathsend`."""

    def __init__(self) -> None:
        self.may_end = asyncio.Event()
        self.end = asyncio.get_running_loop().create_future()

    async def work(self) -> None:
        try:
            await self.may_end.wait()
        except asyncio.CancelledError:
            self.end.set_result("cancelled")
            raise
        self.end.set_result("done")

    async def finish(self, asked: Asked) -> Any:
        self.may_end.set()
        return await self.end

    async def send(self) -> FileResponse:
        return FileResponse(__file__, background=BackgroundTask(self.work))


def application() -> AsgiApplication:
    remote.watches[NAME] = remote.Watch()
    after_file = AfterFile()
    app: Any = fastapi_app(
        NeutralApp(
            lambda: Worker("front", rank=0, rendezvous=LocalRendezvous(1)),
            answers={
                "/wait": wait_here,
                "/refuse": refuse,
                "/begun": next_begun,
                "/ended": next_ended,
                "/produced": produced,
                "/file-ended": after_file.finish,
            },
            events={
                "/count": lambda _: there(remote.count_to, 40),
                "/give": lambda _: there(remote.give_and_wait, NAME, "one"),
                "/fail": lambda _: there(remote.give_and_refuse, "one"),
                "/slow": lambda _: there(remote.produce, NAME, "slow", ITEM_LENGTH),
                "/quick": lambda _: there(remote.produce, NAME, "quick", ITEM_LENGTH),
            },
            sockets={
                "/echo": echo,
                "/give-socket": lambda _: there(remote.give_and_wait, NAME, "one"),
                "/slow-socket": lambda _: there(
                    remote.produce, NAME, "slow", ITEM_LENGTH
                ),
                "/fail-socket": lambda _: there(remote.give_and_refuse, "one"),
            },
        )
    )
    app.add_api_route("/file", after_file.send)
    return app  # type: ignore[no-any-return]


async def main(port: int) -> None:
    app = application()

    async def announcing(scope: Any, receive: Any, send: Any) -> None:
        async def send_announcing(message: Any) -> None:
            await send(message)
            if message["type"] == "lifespan.startup.complete":
                print("ready", flush=True)  # noqa: T201  (for who has started it)

        await app(scope, receive, send_announcing)

    server = Server(announcing, port=port, interface=Interfaces.ASGI, log_enabled=False)
    await server.serve()


def run(port: int) -> None:
    asyncio.run(main(port))
