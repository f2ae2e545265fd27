"""Plain FastAPI with the model inside, as its documentation has it.

Functions that compute are plain `def`s, which FastAPI runs in threads.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import torch
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

from tests.bench import serving_models as m

models: dict[str, Any] = {}


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    models["classifier"] = m.Classifier()
    models["language"] = m.LanguageModel()
    yield


app = FastAPI(lifespan=lifespan)


class Rows(BaseModel):
    row: list[float]


class Question(BaseModel):
    tokens: int


@app.get("/healthz")
async def health() -> str:
    return "ok"


@app.post("/predict")
def predict(rows: Rows) -> dict[str, list[float]]:
    scores = models["classifier"](torch.tensor([rows.row]))
    return {"scores": scores[0].tolist()}


@app.post("/generate")
def generate(question: Question) -> StreamingResponse:
    tokens = models["language"].generate(question.tokens)
    events = (f"data: {token}\n\n" for token in tokens)
    return StreamingResponse(events, media_type="text/event-stream")


def main() -> None:
    options = m.arguments()
    os.environ["OMP_NUM_THREADS"] = "1"
    m.run_uvicorn("tests.bench.sides.serve_fastapi:app", options)


if __name__ == "__main__":
    main()
