"""How the metrics of workers are used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from aiohttp import web

from asyncrpc import observability
from tests.integration.misuse.using import Use
from tests.integration.misuse.wrong import World

TEXT: Final = {"text", "text with a surrogate", "empty text", "too large"}
WORKERS: Final = {"an ended worker", "another worker"}
FLAG: Final = {"true"}
OPTIONS: Final = {"with_process": FLAG, "peers_max": {"an integer"}}


def _worker(world: World) -> Any:
    return world.a


def _metrics(world: World) -> observability.Metrics:
    return observability.Metrics(world.a)


def _closing(world: World) -> Callable[[], None]:
    return observability.Metrics(world.a).close


USES: Final[Mapping[str, Use]] = {
    "observability.Metrics": Use(
        lambda _: observability.Metrics,
        needs_worker=False,
        right={"worker": _worker},
        fits={"worker": WORKERS, **OPTIONS},
    ),
    "observability.Metrics.close": Use(_closing, needs_worker=False),
    "observability.Metrics.text": Use(
        lambda world: _metrics(world).text, needs_worker=False, fits={"accept": TEXT}
    ),
    "observability.add_metrics": Use(
        lambda _: observability.add_metrics,
        needs_worker=False,
        right={"app": lambda _: web.Application(), "worker": _worker},
        fits={"worker": WORKERS, **OPTIONS},
    ),
    "observability.metrics_asgi": Use(
        lambda _: observability.metrics_asgi,
        needs_worker=False,
        right={"metrics": _metrics},
    ),
    "observability.serve_metrics": Use(
        lambda _: observability.serve_metrics,
        needs_worker=False,
        right={"worker": _worker, "port": lambda _: 0},
        fits={
            "worker": WORKERS,
            "port": {"an integer"},  # who is not root may not have it
            "host": {"empty text"},
            **OPTIONS,
        },
    ),
}
