"""BentoML: services for the models, with its own batching, and one for the web."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncGenerator
from typing import Any

import bentoml
import numpy as np
import torch

from tests.bench import serving_models as m

SETTINGS: Any = {
    "traffic": {"timeout": 60, "max_concurrency": 512},
    "logging": {"access": {"enabled": False}},
}
WEB_WORKERS = int(os.environ.get("BENCH_SERVE_WEB_WORKERS", "1"))


@bentoml.service(workers=1, **SETTINGS)
class ClassifierService:
    def __init__(self) -> None:
        self.model = m.Classifier()

    @bentoml.api(
        batchable=True,
        max_batch_size=m.BATCH_MAX,
        max_latency_ms=10_000,  # beyond it requests are refused
    )
    def classify(self, rows: np.ndarray) -> np.ndarray:
        return self.model(torch.from_numpy(rows)).numpy()


@bentoml.service(workers=1, **SETTINGS)
class LanguageService:
    def __init__(self) -> None:
        self.model = m.LanguageModel()

    @bentoml.api
    async def events(self, tokens: int) -> AsyncGenerator[str, None]:
        for token in self.model.generate(tokens):
            yield f"data: {token}\n\n"


@bentoml.service(workers=WEB_WORKERS, **SETTINGS)
class WebService:
    classifier = bentoml.depends(ClassifierService)
    language = bentoml.depends(LanguageService)

    @bentoml.api(route="/predict")
    async def predict(self, row: list[float]) -> dict[str, Any]:
        rows = np.asarray([row], dtype=np.float32)
        scores = await self.classifier.to_async.classify(rows)
        return {"scores": scores[0].tolist()}

    @bentoml.api(route="/generate")
    async def generate(self, tokens: int) -> AsyncGenerator[str, None]:
        async for event in self.language.to_async.events(tokens):
            yield event


def main() -> None:
    options = m.arguments()
    os.environ["BENCH_SERVE_WEB_WORKERS"] = str(options.web_workers)
    os.environ["BENTOML_DO_NOT_TRACK"] = "True"
    command = [sys.executable, "-m", "bentoml", "serve"]
    command += ["tests.bench.sides.serve_bentoml:WebService"]
    command += ["--port", str(options.port), "--host", "127.0.0.1"]
    os.execv(sys.executable, command)  # noqa: S606  (nothing in it comes from outside)


if __name__ == "__main__":
    main()
