"""The local part of a backward pass: what is ready runs, what comes out is sent on."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial

from asyncrpc.autograd.engine import Engine, Leaving, Run, prepare
from asyncrpc.autograd.functions import leaves_of
from asyncrpc.autograd.inline import Runner
from asyncrpc.autograd.machine import Report
from asyncrpc.autograd.placing import on_devices_of
from asyncrpc.autograd.ports import Threads
from asyncrpc.autograd.requests import PassRequests
from asyncrpc.autograd.state import ABORTED, Pass
from asyncrpc.errors import AutogradError
from asyncrpc.ids import Incarnation


class PassWork:
    """Runs the parts that passes have of this worker's graph."""

    def __init__(
        self, me: Incarnation, engine: Engine, requests: PassRequests, threads: Threads
    ) -> None:
        """Prepare to run.

        Args:
            me: this worker.
            engine: runs segments of the graph.
            requests: take on what comes out.
            threads: run the engine.
        """
        self._me = me
        self._engine = engine
        self._requests = requests
        self._threads = threads
        self._runner = Runner(threads, engine.lock)

    async def work(self, one: Pass) -> list[Report]:
        """Do what can be done; return the answer to who asked for it.

        Raises:
            Exception: why the pass has failed.
        """
        if not one.wave.engage():
            if not one.wave.is_running:  # who runs it looks again
                one.wave.is_running = True  # from now on: nobody may take us for idle
                # First what others wait for, then an answer that nobody hurries for.
                # If it fails, so has the pass, and whoever waits for that knows.
                with suppress(Exception):
                    await self._drain(one)
            return []
        if not one.wave.is_running:
            one.wave.is_running = True
            await self._drain(one)
        await one.idle()
        return one.wave.disengage(self._me, is_done=one.machine.is_done)

    async def close(self, one: Pass) -> list[Report]:
        """Nobody takes part who has not been asked: go on, and tell the others."""
        if one.is_settled:
            return []
        one.is_settled = True
        one.machine.rule_out()
        self._requests.close(one)
        return await self.work(one)

    async def _drain(self, one: Pass) -> None:
        """Run what is ready, until nothing is; send on what comes out."""
        try:
            while await self._run_segment(one):
                one.check()
        except asyncio.CancelledError:
            one.fail(AutogradError(ABORTED))
            raise  # the thread goes on
        except BaseException as error:  # a hook of the user's may exit
            one.wave.is_running = False
            one.fail(error)
            raise
        one.wave.is_running = False
        one.look_up()

    async def _run_segment(self, one: Pass) -> bool:
        """Run a segment, if one is ready; say whether it was."""
        segment = one.machine.next_segment()
        if segment is None:
            self._requests.send(one, list(one.new), [], {})
            return False
        if not segment.is_whole and one.new:
            ready = set(leaves_of(segment.nodes)[1])
            later = [leaf for leaf in one.new if leaf not in ready]
            self._requests.send(one, later, [], {})
        starts = [(one.edges[key], one.arrived.pop(key)) for key in segment.starts]
        entering = [gradient for _, gradient in starts if gradient is not None]
        prepared = partial(
            prepare, segment, starts, one.region, one.flow, one.keeping
        )  # which may add gradients up
        run = await on_devices_of(self._threads, entering, prepared)
        leaving = run.straight_through()
        if leaving is None:
            leaving = await self._run(run)
        one.check()
        self._requests.send(one, [], run.received, leaving)
        return True

    async def _run(self, run: Run) -> Leaving:
        """Run a segment: in a thread, or at once if its like is always short."""
        kind, job = run.kind, partial(self._engine.run, run)
        if self._runner.may_run_here(kind):
            return self._runner.run_here(kind, job)
        return await self._runner.run_in_thread(kind, job)
