"""An ASGI application with a model, for real web servers; it needs no framework."""

from __future__ import annotations

import json
import os
from typing import Any

import torch

from asyncrpc.serving import ModelHost
from tests.integration.serving.model_host import models

hosts: list[ModelHost] = []  # of this web worker


async def app(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "lifespan":
        await _live(receive, send)
        return
    model = hosts[0].model.rpc_async()
    rows = torch.ones(4 << 18)
    answer = {
        "web": os.getpid(),
        "model": await model.pid(),
        "total": await model.total(rows),
        "inside": (await hosts[0].peer.call(models.look_inside))._asdict(),
    }
    body = json.dumps(answer).encode()
    headers = [(b"content-length", str(len(body)).encode()), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _live(receive: Any, send: Any) -> None:
    await receive()
    async with ModelHost(models.make_model, linger_s=3600.0) as host:
        hosts.append(host)
        await send({"type": "lifespan.startup.complete"})
        await receive()
    await send({"type": "lifespan.shutdown.complete"})
