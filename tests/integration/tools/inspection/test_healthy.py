"""Work that goes on never looks as if it did not; see `tests.soak.healthy`."""

from __future__ import annotations

from typing import ClassVar

import uvloop

from tests.soak.healthy import soak


class TestHealthyWork:
    """On one kind of loop; the workers in processes have the same."""

    loops: ClassVar = {"uvloop": uvloop.new_event_loop}

    async def test_healthy_work_is_not_reported(self) -> None:
        quiet = await soak(4.0, method="forkserver")
        assert quiet.said == []
        assert quiet.looks
        assert all(quiet.rounds.values()), quiet.rounds
