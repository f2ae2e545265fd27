"""A request's way through an ASGI door, a replica and a batch is short."""

from __future__ import annotations

import asyncio
from typing import Any

import torch

import asyncrpc
from asyncrpc import serving
from asyncrpc.serving import asgi
from asyncrpc.testing import Cluster
from tests.visits import Visits, shortest

RUNS = 10
SCOPE = {
    "type": "http",
    "asgi": {"version": "3.0"},
    "http_version": "1.1",
    "method": "GET",
    "path": "/",
    "headers": [],
}

batchers: list[serving.Batcher[torch.Tensor, torch.Tensor]] = []


async def double(rows: list[torch.Tensor]) -> list[torch.Tensor]:
    return [2 * row for row in rows]


@asyncrpc.idempotent
async def predict(row: torch.Tensor) -> torch.Tensor:
    return await batchers[0](row)


async def test_a_request_visits_few_files() -> None:
    async with (
        Cluster(names=["web", "model-0", "model-1"]) as (web, *models),
        serving.Replica(models[0]),
        serving.Replica(models[1]),
        serving.Replicas(web, "model-*") as replicas,
        serving.Batcher(double, max_size=1, max_wait_s=0.0) as batcher,
    ):
        batchers[:] = [batcher]

        async def answer(_scope: Any, _receive: Any, send: Any) -> None:
            doubled = await replicas.call(predict, torch.ones(3))
            await send({"type": "http.response.start", "status": 200, "headers": []})
            body = str(doubled.sum().item()).encode()
            await send({"type": "http.response.body", "body": body})

        door = asgi.WorkerMiddleware(answer, timeout_s=3600.0)
        walks = []
        for _ in range(RUNS):
            has_answer = asyncio.Event()
            sent: list[Any] = []
            to_come = [{"type": "http.request", "body": b"", "more_body": False}]

            async def receive(
                to_come: list[Any] = to_come, has_answer: asyncio.Event = has_answer
            ) -> Any:
                if to_come:
                    return to_come.pop()
                await has_answer.wait()
                return {"type": "http.disconnect"}

            async def send(message: Any, sent: list[Any] = sent) -> None:
                sent.append(message)

            with Visits() as visits:
                await door(SCOPE | {"state": {"asyncrpc_worker": web}}, receive, send)
            has_answer.set()
            assert sent[-1]["body"] == b"6.0"
            walks.append(visits)
    files = set(shortest(walks))
    assert len(files) <= 47, sorted(files)
