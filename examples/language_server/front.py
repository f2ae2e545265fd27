"""The web application: it holds no model, and asks the replicas."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

from aiohttp import web

import asyncrpc
from asyncrpc import serving
from asyncrpc.errors import PublishError
from examples.language_server.workers import (
    REPLICAS,
    TRAINER,
    figures,
    let_publish,
    progress,
    write,
)
from examples.language_server.writer import ALICE, Alphabet, Prompt

PAGE = Path(__file__).parent / "page"
LENGTH_MAX, PROMPT_MAX = 50_000, 200
BOLDNESS_MIN, BOLDNESS_MAX = 0.1, 2.0
MOVES_MAX = 3  # replicas that may be lost while they write one text
LOOK_S = 0.5  # between two looks at the replicas, however many pages are open


class Front:
    """The application's handlers."""

    def __init__(self, worker: asyncrpc.Worker, replicas: serving.Replicas) -> None:
        self._worker = worker
        self._replicas = replicas
        self._publisher = serving.Publisher(worker, REPLICAS)
        self._alphabet = Alphabet(ALICE.read_text("utf-8"))
        self._looked: dict[str, Any] = {}
        self._news = asyncio.Condition()

    def routes(self) -> list[web.AbstractRouteDef]:
        """Return what the application answers."""
        return [
            web.get("/", self.get_page),
            web.get("/write", self.get_text),
            web.get("/figures", self.get_figures),
            web.post("/roll-back", self.post_roll_back),
            web.post("/publish", self.post_publish),
            *serving.health_routes(),
            web.static("/", PAGE),
        ]

    async def get_page(self, _: web.Request) -> web.FileResponse:
        return web.FileResponse(PAGE / "index.html")

    # --- a text ----------------------------------------------------------------------

    async def get_text(self, request: web.Request) -> web.StreamResponse:
        """Stream a text, character by character."""
        try:
            codes, length, boldness = self._asked(request.query)
        except KeyError as error:
            return _refused(f"the query must have {error}", error)
        except ValueError as error:
            return _refused(str(error), error)
        pieces = self._written(codes, length, boldness)
        return await serving.sse_response(request, pieces, end_event="end")

    def _asked(self, query: Mapping[str, str]) -> tuple[list[int], int, float]:
        """Return what a client asks for: codes of the prompt, length, boldness.

        Raises:
            KeyError: a field is missing.
            ValueError: a field is out of its range.
        """
        text, length = query["prompt"], int(query["length"])
        boldness = float(query["boldness"])
        if not 0 < len(text) <= PROMPT_MAX:
            raise ValueError(f"the prompt must have 1 to {PROMPT_MAX} characters")
        if not 0 < length <= LENGTH_MAX:
            raise ValueError(f"length must be 1 to {LENGTH_MAX}, not {length}")
        if not BOLDNESS_MIN <= boldness <= BOLDNESS_MAX:
            raise ValueError(
                f"boldness must be {BOLDNESS_MIN} to {BOLDNESS_MAX}, not {boldness:g}"
            )
        return self._alphabet.encode(text), length, boldness

    async def _written(
        self, codes: list[int], length: int, boldness: float
    ) -> AsyncIterator[Any]:
        """Yield a text; if its replica is lost, let another one go on from there."""
        written: list[int] = []
        for moves in range(MOVES_MAX + 1):
            left = length - len(written)
            prompt = Prompt(codes + written, left, boldness, random.getrandbits(32))
            try:
                async with aclosing(self._replicas.stream(write, prompt)) as pieces:
                    async for piece, name in pieces:
                        if len(written) == length - left:
                            place = {"replica": name, "version": piece.version}
                            yield serving.ServerSentEvent(
                                {**place, "moved": moves > 0}, event="place"
                            )
                        written.append(piece.code)
                        yield {"text": self._alphabet.characters[piece.code]}
            except asyncrpc.WorkerLostError:
                if moves == MOVES_MAX:
                    raise
            else:
                return

    # --- figures ---------------------------------------------------------------------

    async def get_figures(self, request: web.Request) -> web.StreamResponse:
        """Stream how the replicas and the trainer are doing."""
        return await serving.sse_response(request, self._told())

    async def _told(self) -> AsyncIterator[dict[str, Any]]:
        while True:
            async with self._news:
                await self._news.wait()
                looked = self._looked
            yield looked

    async def look(self) -> None:
        """Look at all replicas, again and again, for all pages."""
        while True:
            statuses = self._replicas.statistics().replicas
            rows = await asyncio.gather(*(self._row(status) for status in statuses))
            looked = {"replicas": rows, "training": await self._training()}
            async with self._news:
                self._looked = looked
                self._news.notify_all()
            await asyncio.sleep(LOOK_S)

    async def _row(self, status: serving.ReplicaStatus) -> list[str]:
        begun = [status.name, status.state.lower(), f"{status.version}"]
        try:
            peer = self._worker.peer(status.name).using(timeout_s=LOOK_S)
            result = await peer.call(figures)
        except asyncrpc.AsyncRpcError:
            return [*begun, "-", "-", "-"]
        return [*begun, f"{result.writing}", f"{result.waiting}", f"{result.rate:,.0f}"]

    async def _training(self) -> str:
        try:
            trainer = self._worker.peer(TRAINER).using(timeout_s=LOOK_S)
            steps, perplexity = await trainer.call(progress)
        except asyncrpc.AsyncRpcError:
            return "The trainer does not answer"
        return f"The trainer has done {steps:,} steps; perplexity {perplexity:.1f}"

    # --- versions --------------------------------------------------------------------

    async def post_roll_back(self, _: web.Request) -> web.Response:
        """Serve the version before, and no new one until `publish`."""
        await self._worker.peer(TRAINER).call(let_publish, may=False)
        try:
            served = sorted(set((await self._publisher.roll_back()).values()))
        except PublishError as error:
            return _refused(str(error), error, status=409)
        versions = ", ".join(map(str, served))
        return web.json_response({"message": f"Serving version {versions}"})

    async def post_publish(self, _: web.Request) -> web.Response:
        """Serve new versions again."""
        await self._worker.peer(TRAINER).call(let_publish, may=True)
        return web.json_response({"message": "New versions are served again"})


def _refused(message: str, error: Exception, status: int = 400) -> web.Response:
    body = {"error": type(error).__name__, "message": message}
    return web.json_response(body, status=status)
