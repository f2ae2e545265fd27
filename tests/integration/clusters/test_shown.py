"""What a notebook shows of a running cluster and its objects: it asks no worker."""

from __future__ import annotations

import asyncio
import os
import re
import signal

import pytest

import asyncrpc
from asyncrpc import Cluster
from asyncrpc.errors import AlreadyStartedError, UsageError


class Divider:
    def by(self, n: int) -> int:
        return 12 // n


def text_of(html: str) -> str:
    """Return the text of a table, its cells apart."""
    return re.sub(r"(<[^>]*>)+", "|", html)


async def test_cluster_shows_its_workers() -> None:
    cluster = Cluster(2)
    assert repr(cluster) == "<Cluster 'cluster': 2 workers, not entered>"
    assert "2 workers, not entered" in cluster._repr_html_()
    async with cluster:
        pid = await cluster["w0"].call(os.getpid)
        changes = cluster.changes()
        os.kill(await cluster["w1"].call(os.getpid), signal.SIGKILL)
        assert (await anext(changes)).kind == "failed"
        assert repr(cluster) == "<Cluster 'cluster': 1 worker, 1 running>"
        shown = text_of(cluster._repr_html_())
        assert f"|w0|●| running|{pid}|{os.uname().nodename}|" in shown
        assert re.search(r"\|[\d.]+ [MG]iB\|0\.2\|", shown)
        assert "|w1|●| ended |its process was killed by SIGKILL|" in shown
    assert repr(cluster) == "<Cluster 'cluster': ended>"
    assert "ended" in cluster._repr_html_()


async def test_workers_peers_and_references_show_their_state() -> None:
    async with Cluster(1) as cluster:
        peer = cluster["w0"].using(timeout_s=30.0)
        await peer.call(os.getpid)
        shown = text_of(peer._repr_html_())
        assert "connected |calls sent: " in shown
        assert "|timeout_s|30.0|" in shown
        assert "2: cluster, w0" in text_of(cluster.worker._repr_html_())
        reference = asyncrpc.remote("w0", os.getpid)
        assert "being made" in text_of(reference._repr_html_())
        await reference
        assert "|owner|w0|state|●| held |" in text_of(reference._repr_html_())
        await cluster.stop("w0")
        assert "lost" in text_of(reference._repr_html_())
        assert "not connected" in text_of(peer._repr_html_())
    assert "does not run" in text_of(peer._repr_html_())
    assert "closed" in text_of(cluster.worker._repr_html_())


async def test_actors_and_their_replies_are_shown() -> None:
    async with Cluster(1) as cluster:
        dividers = await cluster.spawn(Divider, per_worker=2)
        assert "2 Actors of Divider|actor|worker|0|w0|1|w0|" in text_of(
            dividers._repr_html_()
        )
        shown = text_of(dividers[1]._repr_html_())
        assert f"|class|{__name__}.Divider|worker|w0|made again|never|" in shown
        numbers = asyncrpc.scatter([0, 4])
        async for reply in dividers.by.as_completed(numbers):
            said = "raised" if reply.actor.index == 0 else "returned 3"
            assert repr(reply).startswith(f"<ActorReply {said}")
            assert f"|{said.split(maxsplit=1)[0]}|" in text_of(reply._repr_html_())


async def test_awaited_cluster_outlasts_its_task_and_is_replaced() -> None:
    async def start() -> Cluster:
        return await Cluster(1)

    former = await asyncio.create_task(start())
    try:
        assert asyncrpc.current_worker() is former.worker
        with pytest.raises(AlreadyStartedError, match="entered before"):
            await former
        other = await Cluster(1, name="other")
        assert not former.worker.is_closed
        await other.close()
        cluster = await asyncio.create_task(start())
        assert former.worker.is_closed
        assert await cluster["w0"].call(divmod, 17, 5) == (3, 2)
        with pytest.raises(UsageError, match="event loop"):
            await asyncio.to_thread(asyncio.run, cluster.close())
    finally:
        await cluster.close()
    await cluster.close()
    await Cluster(1).close()  # it has not begun
    assert cluster.worker.is_closed
