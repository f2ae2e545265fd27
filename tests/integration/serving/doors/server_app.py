"""An application that servers import by name: each web worker shares and launches."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import torch
from aiohttp import web

import asyncrpc
from asyncrpc import LocalRendezvous, Worker
from asyncrpc.multiprocessing import launch
from tests.integration.serving.doors.applications import aiohttp_app, bare_app
from tests.integration.serving.doors.neutral import Asked, NeutralApp

CHILDREN = 2


def add_rank(rank: int, shared: torch.Tensor) -> int:
    shared[rank] += rank + 1
    return os.getpid()


def answer(shared: torch.Tensor) -> dict[str, Any]:
    """Start processes, in the web worker; return what is there afterwards."""
    pids = launch(add_rank, args=(shared,), nprocs=CHILDREN)
    return {"pids": [os.getpid(), *pids], "shared": shared.tolist()}


async def work(asked: Asked) -> Any:
    shared = asyncrpc.share(torch.zeros(CHILDREN))
    return await asyncrpc.rpc_async("front", answer, args=(shared,))


def make_worker() -> Worker:
    return Worker("front", rank=0, rendezvous=LocalRendezvous(1))


neutral = NeutralApp(make_worker, answers={"/work": work})
app = bare_app(neutral)


def make_aiohttp(_: list[str]) -> web.Application:
    """Return the application for `python -m aiohttp.web`."""
    return aiohttp_app(neutral)


async def make_for_gunicorn() -> web.Application:
    """Return the application for gunicorn's worker of aiohttp."""
    await asyncio.sleep(0)
    return aiohttp_app(neutral)
