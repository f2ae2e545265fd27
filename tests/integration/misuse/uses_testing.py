"""How the kit for tests is used: clusters, processes, proxies."""

from __future__ import annotations

import os
import signal
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from asyncrpc.testing import Cluster, ProcessCluster, Proxy, acting_as, all_end
from asyncrpc.testing.proxy import Way
from tests.integration.misuse.beside import giving
from tests.integration.misuse.uses_values import FLAG
from tests.integration.misuse.using import Use, nothing
from tests.integration.misuse.wrong import SECONDS, World

_WORKERS: Final = {"an ended worker", "another worker"}
_COUNTS: Final = {"an integer", "an integer of 70 bits"}
_NOBODY: Final = "tcp://127.0.0.1:1"


def _process_cluster(_: World | None = None) -> ProcessCluster:
    return ProcessCluster(["process"], method="forkserver")


def _proxy(_: World | None = None) -> Proxy:
    return Proxy(_NOBODY)


async def _entered(manager: Any) -> None:
    with manager:
        pass


async def _processes(_: World) -> None:
    """Start processes, and end one of them."""
    cluster = _process_cluster()
    async with cluster as worker:
        pid = await worker.peer("process").call(os.getpid)
        assert cluster.pid("process") == pid
        cluster.expect_death("process")
        cluster.kill("process", signal.SIGKILL)


async def _refused(_: World) -> None:
    async with _proxy() as proxy:
        await proxy.refuse()
        await proxy.accept()


def _accepting(_: World) -> Callable[[], Awaitable[None]]:
    """Return what lets a proxy accept; it refuses then, so that it leaves nothing."""
    proxy = _proxy()

    async def accept() -> None:
        await proxy.accept()
        await proxy.refuse()

    return accept


async def _spared(_: World) -> None:
    proxy = _proxy()
    proxy.spare(proxy.cut_after(Way.TO_TARGET))


def _of_proxy(name: str, **about: Any) -> Use:
    """Return how a method of a proxy is used that waits for nothing."""
    return Use(
        lambda _: getattr(_proxy(), name), finish=nothing, needs_worker=False, **about
    )


USES: Final[Mapping[str, Use]] = {
    "testing.all_end": Use(
        lambda _: all_end,
        right={"within_s": lambda _: 30},
        fits={"within_s": (SECONDS - {"none"}) | {"infinite"}},
        needs_worker=False,
    ),
    "testing.acting_as": Use(
        lambda _: acting_as,
        needs_worker=False,
        right={"worker": lambda world: world.a},
        fits={"worker": _WORKERS},
        finish=_entered,
    ),
    "testing.Cluster": Use(
        lambda _: Cluster,
        needs_worker=False,
        right={"count": lambda _: 1},
        fits={"count": {"an integer"}, "names": {"an empty list"}, "options": {"none"}},
    ),
    "testing.Cluster.__aenter__": Use(lambda _: giving(Cluster(1)), needs_worker=False),
    "testing.ProcessCluster": Use(
        lambda _: ProcessCluster,
        needs_worker=False,
        right={"names": lambda _: ["process"]},
        fits={
            "names": {"an empty list"},
            "name": {"text", "text with a surrogate", "too large"},
            "options": {"none"},
        },
        finish=nothing,
    ),
    "testing.ProcessCluster.__aenter__": Use(
        lambda _: giving(_process_cluster()), rightly=_processes, needs_worker=False
    ),
    "testing.ProcessCluster.pid": Use(
        lambda _: _process_cluster().pid,
        right={"name": lambda _: "process"},
        rightly=_processes,
        needs_worker=False,
    ),
    "testing.ProcessCluster.expect_death": Use(
        lambda _: _process_cluster().expect_death,
        right={"name": lambda _: "process"},
        rightly=_processes,
        needs_worker=False,
    ),
    "testing.ProcessCluster.kill": Use(
        lambda _: _process_cluster().kill,
        needs_worker=False,
        right={"name": lambda _: "process"},
        fits={"signal_number": {"an integer"}},
        rightly=_processes,
    ),
    "testing.Proxy": Use(
        lambda _: Proxy, needs_worker=False, right={"target": lambda _: _NOBODY}
    ),
    "testing.Proxy.__aenter__": Use(
        lambda _: giving(_proxy()), rightly=_refused, needs_worker=False
    ),
    "testing.Proxy.refuse": Use(
        lambda _: _proxy().refuse, rightly=_refused, needs_worker=False
    ),
    "testing.Proxy.accept": Use(_accepting, rightly=_refused, needs_worker=False),
    "testing.Proxy.cut": _of_proxy("cut", fits={"reset": FLAG}),
    "testing.Proxy.cut_after": _of_proxy(
        "cut_after",
        right={"way": lambda _: Way.TO_TARGET},
        fits={"frames": _COUNTS, "nbytes": _COUNTS, "reset": FLAG},
    ),
    "testing.Proxy.spare": Use(
        lambda _: _proxy().spare,
        right={"cut": lambda _: _proxy().cut_after(Way.TO_TARGET)},
        rightly=_spared,
        needs_worker=False,
    ),
    "testing.Proxy.partition": _of_proxy("partition"),
    "testing.Proxy.heal": _of_proxy("heal"),
    "testing.Proxy.delay": _of_proxy(
        "delay", right={"delay_s": lambda _: 0.5}, fits={"delay_s": SECONDS - {"none"}}
    ),
    "testing.Proxy.throttle": _of_proxy(
        "throttle", right={"bytes_per_s": lambda _: 1e6}, fits={"bytes_per_s": SECONDS}
    ),
}
