"""Ray Serve: one deployment for each model, with its own batching.

Web workers are not its way: one proxy a node takes the requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import ray
import torch
from ray import serve
from starlette.requests import Request
from starlette.responses import StreamingResponse

from tests.bench import serving_models as m


@serve.deployment(max_ongoing_requests=512, ray_actor_options={"num_cpus": 0.5})
class ClassifierDeployment:
    def __init__(self) -> None:
        self.model = m.Classifier()

    @serve.batch(max_batch_size=m.BATCH_MAX, batch_wait_timeout_s=m.BATCH_WAIT_S)
    async def classify(self, rows: list[list[float]]) -> list[list[float]]:
        scores: list[list[float]] = self.model(torch.tensor(rows)).tolist()
        return scores

    async def __call__(self, request: Request) -> dict[str, Any]:
        body = await request.json()
        return {"scores": await self.classify(body["row"])}


@serve.deployment(max_ongoing_requests=512, ray_actor_options={"num_cpus": 0.5})
class LanguageDeployment:
    def __init__(self) -> None:
        self.model = m.LanguageModel()

    async def _events(self, tokens: int) -> AsyncIterator[str]:
        for token in self.model.generate(tokens):
            yield f"data: {token}\n\n"
            await asyncio.sleep(0)  # others have a turn

    async def __call__(self, request: Request) -> StreamingResponse:
        body = await request.json()
        events = self._events(body["tokens"])
        return StreamingResponse(events, media_type="text/event-stream")


@serve.deployment(ray_actor_options={"num_cpus": 0.1})
class Health:
    async def __call__(self, _: Request) -> str:
        return "ok"


def main() -> None:
    options = m.arguments()
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": options.port})
    language, classifier = LanguageDeployment.bind(), ClassifierDeployment.bind()
    serve.run(language, name="language", route_prefix="/generate")
    serve.run(classifier, name="classifier", route_prefix="/predict")
    serve.run(Health.bind(), name="health", route_prefix="/healthz", blocking=True)


if __name__ == "__main__":
    main()
