"""Two workers that reach each other only through proxies, one in front of each."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace

from asyncrpc import NetworkOptions, Options, Worker
from asyncrpc.testing import Proxy
from tests.integration.core.groups import REPOSITORY
from tests.ports import free_port

SECRET = "known to all of the group"


@asynccontextmanager
async def proxied(
    *names: str, options: Options | None = None
) -> AsyncIterator[tuple[Mapping[str, Worker], Mapping[str, Proxy]]]:
    """Start workers, each behind a proxy of its own; give both by name.

    The first is connected to the others, through their proxies.
    """
    base_options = options or Options(drain_timeout_s=1.0)
    proxies = {name: Proxy(f"tcp://127.0.0.1:{free_port()}") for name in names}
    workers = {}
    try:
        for proxy in proxies.values():
            await proxy.__aenter__()
        where = {name: proxy.address for name, proxy in proxies.items()}
        for name, proxy in proxies.items():
            own = replace(
                base_options,
                secret=SECRET,
                network=replace(
                    base_options.network,
                    listen=(str(proxy.target),),
                    advertise=(proxy.address,),
                ),
            )
            workers[name] = Worker(name, rendezvous=where, options=own)
        for worker in workers.values():
            await worker.__aenter__()
        for name in names[1:]:
            await workers[names[0]].peer(name).call(max, 1, 2)
        yield workers, proxies
    finally:
        for worker in workers.values():
            await worker.shutdown()
        for proxy in proxies.values():
            await proxy.__aexit__(None, None, None)


@asynccontextmanager
async def in_process(
    name: str, *, options: Options
) -> AsyncIterator[tuple[Worker, asyncio.subprocess.Process, Proxy]]:
    """Start a worker in a process behind a proxy, and the worker "a" here."""
    listen = f"tcp://127.0.0.1:{free_port()}"
    here = f"tcp://127.0.0.1:{free_port()}"
    async with Proxy(listen) as proxy:
        where = {"a": here, name: proxy.address}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.integration.core.proxied"),
            *(name, listen, proxy.address, here),
            cwd=REPOSITORY,
            stdout=asyncio.subprocess.PIPE,
            stdin=asyncio.subprocess.PIPE,
        )
        own = replace(
            options, secret=SECRET, network=replace(options.network, listen=(here,))
        )
        try:
            assert process.stdout is not None
            assert await process.stdout.readline() == b"ready\n"
            async with Worker("a", rendezvous=where, options=own) as worker:
                yield worker, process, proxy
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def _serve(name: str, listen: str, advertise: str, other: str) -> None:
    """Be a worker until the standard input ends."""
    options = Options(
        secret=SECRET,
        network=NetworkOptions(listen=(listen,), advertise=(advertise,)),
        membership="static",
    )
    async with Worker(name, rendezvous={"a": other, name: advertise}, options=options):
        print("ready", flush=True)  # noqa: T201  (its parent waits for it)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(_serve(*sys.argv[1:]))
