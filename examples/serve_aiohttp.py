"""Answer HTTP requests with a model that lives on other processes, and trains there.

    $ python examples/serve_aiohttp.py            # serves http://127.0.0.1:8080
    $ curl -d '{"pixels": [0, 5, 13, ...64 of them]}' http://127.0.0.1:8080/predict
    $ python examples/serve_aiohttp.py --quick    # serve, ask, print a table, end

`front` serves HTTP and holds no weights; `hidden` and `output` hold a layer each.
Requests that come together travel as one batch.  A client that hangs up cancels its own
part of the work and nobody else's.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import torch
from aiohttp import web
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

import asyncrpc
from asyncrpc import serving

NAMES = ("front", "hidden", "output")
TRAINING_ROWS, BATCH_ROWS, ENOUGH_STEPS, ASKED_ROWS = 1500, 64, 200, 200


class Model:
    """The front's view of a model whose layers are elsewhere."""

    def __init__(self) -> None:
        inner = (nn.Linear(64, 128), nn.ReLU())
        self.hidden = asyncrpc.nn.RemoteModule("hidden", nn.Sequential, inner)
        self.output = asyncrpc.nn.RemoteModule("output", nn.Linear, (128, 10))
        self.steps = 0
        self.trained, self.is_ending = asyncio.Event(), False

    async def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Map `(rows, 64)` pixels to `(rows, 10)` logits."""
        logits: torch.Tensor = await self.output.forward_async(
            await self.hidden.forward_async(rows)
        )
        return logits

    async def predict(self, rows: list[torch.Tensor]) -> list[int]:
        """Answer a batch of requests at once."""
        digits: list[int] = (await self.forward(torch.stack(rows))).argmax(1).tolist()
        return digits

    async def train(self, pixels: torch.Tensor, digits: torch.Tensor) -> None:
        """Train, while requests are answered, until it is told to end."""
        parameters = await self.hidden.remote_parameters()
        parameters += await self.output.remote_parameters()
        optimizer = asyncrpc.optim.DistributedOptimizer(
            torch.optim.Adam, parameters, lr=0.003
        )
        while not self.is_ending:
            chosen = torch.randint(TRAINING_ROWS, (BATCH_ROWS,))
            async with asyncrpc.autograd.context() as context:
                logits = await self.forward(pixels[chosen])
                loss = functional.cross_entropy(logits, digits[chosen])
                await asyncrpc.autograd.backward(context, [loss])
                await optimizer.step(context)
            self.steps += 1
            if self.steps == ENOUGH_STEPS:
                self.trained.set()


@asynccontextmanager
async def served(
    worker: asyncrpc.Worker, model: Model, port: int
) -> AsyncIterator[str]:
    """Serve the model on loopback; yield the URL."""
    predict = serving.Batcher(model.predict, max_size=64, max_wait_s=0.002)

    async def answer(request: web.Request) -> web.Response:
        pixels = torch.tensor((await request.json())["pixels"], dtype=torch.float32)
        body = {"digit": await predict(pixels), "after_steps": model.steps}
        return web.json_response(body)

    app = web.Application(middlewares=[serving.middleware(timeout_s=5.0)])
    app.cleanup_ctx.append(serving.worker_context(worker))
    app.add_routes([web.post("/predict", answer), *serving.health_routes()])
    runner = web.AppRunner(app, handler_cancellation=True)
    async with predict:
        try:
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", port).start()
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


async def ask(url: str, pixels: torch.Tensor, digits: list[int]) -> None:
    """Be the clients: send every row at once, and print what comes back."""

    async def predict(row: torch.Tensor) -> tuple[int, float]:
        start_s = time.perf_counter()
        async with client.post("/predict", json={"pixels": row.tolist()}) as response:
            digit: int = (await response.json())["digit"]
        return digit, (time.perf_counter() - start_s) * 1e3

    async with aiohttp.ClientSession(url) as client:
        answers = await asyncio.gather(*map(predict, pixels))
    print(f"{'digit':>6} {'predicted':>10} {'latency, ms':>12}")
    for digit, (predicted, took_ms) in zip(digits[:8], answers, strict=False):
        print(f"{digit:>6} {predicted:>10} {took_ms:>12.1f}")
    right = sum(
        answer[0] == digit for answer, digit in zip(answers, digits, strict=True)
    )
    median_ms = statistics.median(took_ms for _, took_ms in answers)
    print(f"{right} of {len(answers)} right; median latency {median_ms:.1f} ms")


async def run(rank: int, quick: bool, port: int) -> None:  # noqa: FBT001
    """Be one of the three processes."""
    worker = await asyncrpc.init_rpc(NAMES[rank])
    if rank == 0:
        images, labels = load_digits(return_X_y=True)
        pixels, digits = torch.tensor(images).float(), torch.tensor(labels)
        model = Model()
        async with served(worker, model, port) as url, asyncio.TaskGroup() as tasks:
            print(f"serving {url}", flush=True)
            tasks.create_task(model.train(pixels, digits))
            if quick:
                await model.trained.wait()
                await ask(url, pixels[-ASKED_ROWS:], digits[-ASKED_ROWS:].tolist())
                model.is_ending = True
    await asyncrpc.shutdown()  # waits for the others: the layers stay while we serve


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--port", type=int, default=8080)
    chosen = parser.parse_args()
    asyncrpc.multiprocessing.launch(
        run, args=(chosen.quick, 0 if chosen.quick else chosen.port), nprocs=3
    )
