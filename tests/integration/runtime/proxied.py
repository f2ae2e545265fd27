"""Two workers that reach each other only through proxies, one in front of each."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace

from asyncrpc import Options, Worker
from asyncrpc.testing import Proxy
from tests.integration.runtime.groups import free_port

SECRET = "known to all"


@asynccontextmanager
async def proxied(
    *names: str, options: Options | None = None
) -> AsyncIterator[tuple[Mapping[str, Worker], Mapping[str, Proxy]]]:
    """Start workers, each behind a proxy of its own; give both by name."""
    given = options or Options(drain_timeout_s=1.0)
    proxies = {name: Proxy(f"tcp://127.0.0.1:{free_port()}") for name in names}
    workers = {}
    try:
        for proxy in proxies.values():
            await proxy.__aenter__()
        where = {name: proxy.address for name, proxy in proxies.items()}
        for name, proxy in proxies.items():
            own = replace(
                given,
                secret=SECRET,
                listen=(str(proxy.target),),
                advertise=(proxy.address,),
            )
            workers[name] = Worker(name, rendezvous=where, options=own)
        for worker in workers.values():
            await worker.__aenter__()
        yield workers, proxies
    finally:
        for worker in workers.values():
            await worker.shutdown()
        for proxy in proxies.values():
            await proxy.__aexit__(None, None, None)
