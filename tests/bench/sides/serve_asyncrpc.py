"""asyncrpc: one model process, and web workers of uvicorn or of aiohttp before it.

`--door aiohttp` is one web process, as fast as it gets; `--door uvicorn` has as many
web workers as are wanted.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any, Final

import torch
from aiohttp import web

import asyncrpc
from asyncrpc import serving
from tests.bench import serving_models as m

SLOTS: Final = 16  # answers that are made at the same time


class Models:
    """Both models, in the model's process."""

    def __init__(self) -> None:
        self.classifier = m.Classifier()
        self.language = serving.ContinuousBatcher(m.BatchedLanguageModel(), SLOTS)

    def classify(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the scores of rows `(batch, features)`."""
        scores: torch.Tensor = self.classifier(rows)
        return scores


@asynccontextmanager
async def make_models() -> AsyncIterator[Models]:
    """Make the models; and keep them where `generate` finds them."""
    models = Models()
    async with models.language:
        loaded.append(models)
        yield models


loaded: list[Models] = []  # of the model's process


async def generate(tokens: int) -> AsyncIterator[int]:
    """Yield tokens, in the model's process."""
    async with aclosing(loaded[0].language.generate(tokens)) as items:
        async for token in items:
            yield token


class Door:
    """What both doors have behind them."""

    def __init__(self) -> None:
        self.host = serving.ModelHost(make_models, linger_s=1.0)
        self.batcher = serving.Batcher(
            self._classify, m.BATCH_MAX, m.BATCH_WAIT_S, waiting_max=4096
        )

    async def _classify(self, rows: list[list[float]]) -> torch.Tensor:
        model = self.host.model.rpc_async()
        scores: torch.Tensor = await model.classify(torch.tensor(rows))
        return scores

    async def classify(self, body: bytes) -> bytes:
        """Answer one request."""
        scores = await self.batcher(json.loads(body)["row"])
        return json.dumps({"scores": scores.tolist()}).encode()

    def tokens(self, body: bytes) -> AsyncGenerator[int, None]:
        return self.host.peer.stream(generate, json.loads(body)["tokens"])


# --- aiohttp -------------------------------------------------------------------------


def aiohttp_app() -> web.Application:
    door = Door()

    async def life(_: web.Application) -> AsyncIterator[None]:
        async with door.host, door.batcher:
            yield

    async def predict(request: web.Request) -> web.Response:
        body = await door.classify(await request.read())
        return web.Response(body=body, content_type="application/json")

    async def generate_events(request: web.Request) -> web.StreamResponse:
        return await serving.sse_response(request, door.tokens(await request.read()))

    async def health(_: web.Request) -> web.Response:
        return web.Response(text="ok")

    app = web.Application()
    app.cleanup_ctx.append(life)
    app.router.add_get("/healthz", health)
    app.router.add_post("/predict", predict)
    app.router.add_post("/generate", generate_events)
    return app


async def serve_aiohttp(port: int) -> None:
    runner = web.AppRunner(aiohttp_app(), handler_cancellation=True, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, backlog=1024).start()
    await asyncio.Event().wait()  # it is ended by a signal


# --- uvicorn -------------------------------------------------------------------------


class AsgiApp:
    """The same as an ASGI application, without a framework."""

    def __init__(self) -> None:
        self._door = Door()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await receive()
            async with self._door.host, self._door.batcher:
                await send({"type": "lifespan.startup.complete"})
                await receive()
            await send({"type": "lifespan.shutdown.complete"})
            return
        body = b"ok"
        if scope["path"] == "/predict":
            body = await self._door.classify((await receive())["body"])
        headers = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


app = AsgiApp()


def main() -> None:
    options = m.arguments()
    os.environ["OMP_NUM_THREADS"] = "1"
    if options.web_workers == 1:
        asyncrpc.run(serve_aiohttp(options.port))
        return
    m.run_uvicorn("tests.bench.sides.serve_asyncrpc:app", options)


if __name__ == "__main__":
    main()
