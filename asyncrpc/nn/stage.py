"""One stage of a pipeline, on the worker that owns its module.

A step is a call of `run` on every stage.  It owns all that the stage keeps for the
step, graphs and gradients, so whatever ends the call lets go of them: an error here or
elsewhere, a deadline, a cancelled or dead driver.

    driver             stage 0              stage 1
      run          -->
      run          ----------------------->
      take 0       -->
                         forward 0
                         take 0       -->
                         gradients 0  -->
                                            forward 0, loss 0, backward 0
                                      <--   the answer to `gradients 0`
                         backward 0
      computed     <--   (all of it)
      commit       -->
      commit       ----------------------->

The output of a stage is an argument of a call to the next, and the gradients of that
output are the answer to another: neither goes by way of the driver, and no stage refers
to the one before it.  The first call ends when the output is in use, so that it does
not count any longer against what the worker takes in
(`LimitOptions.inbound_bytes_max`).

Gradients of parameters gather in the step and enter the autograd context by `commit`,
which the driver sends when every stage has computed everything.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import nn

from asyncrpc.errors import AutogradError, UsageError
from asyncrpc.nn.schedules import StagePosition
from asyncrpc.nn.stage_run import StageRun, StepPlan
from asyncrpc.rref.handle import RRef
from asyncrpc.rref.shared import copy_of

# Steps that have ended, and why, so that a late input waits for none of them.
ENDED_MAX: Final = 1024


class Stage:
    """A module, its place in a pipeline, and the steps that run through it."""

    def __init__(
        self,
        module: RRef[nn.Module],
        device: str,
        place: Sequence[int],
        following: RRef[Stage] | None,
    ) -> None:
        """Use a module of this worker.

        Args:
            module: a reference to it.
            device: where it is; empty: where its first parameter is.
            place: index of this stage, and how many there are.
            following: the next stage; None for the last.
        """
        self._module = module
        self._device = device
        self._place = StagePosition(*place)
        self._following = following
        self._runs: dict[int, StageRun] = {}
        self._ended: dict[int, BaseException] = {}
        self._begun = asyncio.Event()

    @property
    def held(self) -> int:
        """How many micro-batches have their graphs here now, of all steps."""
        return sum(run.machine.held for run in self._runs.values())

    async def ready(self) -> None:
        """Return when the module has been made; raise if it could not be."""
        await self._made()

    async def run(self, plan: Sequence[Any], **aim: Any) -> tuple[Any, ...]:
        """Do this stage's part of a step; of a training, until it is committed.

        Args:
            plan: the first fields of a `StepPlan`.
            aim: the others, of the last stage; by name, for errors.

        Returns:
            The fields of a `StageAnswer`.
        """
        given = StepPlan(*plan, **aim)
        step = given.number
        reason: BaseException = AutogradError(f"step {step} is over at {self._place}")
        run: StageRun | None = None
        try:
            module = await self._made()
            device = self._device_of(module)
            run = StageRun(given, self._place, module, device, self._following)
            self._runs[step] = run
            self._begun.set()
            return tuple(await run.complete())
        except Exception as error:
            reason = _bare(error)
            raise
        finally:
            self._end(step, reason)

    async def take(
        self, step: int, chunk: int, value: Any, needs: Sequence[bool]
    ) -> None:
        """Take the input of a micro-batch; return when its computation has begun.

        Args:
            step: its number.
            chunk: number of the micro-batch.
            value: the input.
            needs: for each tensor in it, whether its gradient is wanted.
        """
        run = await self._run_of(step)
        run.take(chunk, value, needs)
        del value  # the graph keeps of it what it needs
        await run.input_used(chunk)

    async def gradients(self, step: int, chunk: int) -> list[torch.Tensor | None]:
        """Return the gradients of an input that are wanted, once they are there."""
        run = await self._run_of(step)
        return await run.gradients(chunk)

    async def target(self, step: int, chunk: int, value: Any) -> None:
        """Take the target of a micro-batch, before its input can come here."""
        (await self._run_of(step)).take_target(chunk, value)

    async def computed(self, step: int) -> None:
        """Return when a step has run all of its actions here."""
        run = await self._run_of(step)
        await run.computed()

    async def commit(self, step: int) -> None:
        """Let the gradients of a step enter its autograd context."""
        (await self._run_of(step)).commit()

    async def _made(self) -> nn.Module:
        """Return the module.

        Raises:
            UsageError: it is not a torch.nn.Module.
            Exception: what its constructor raised.
        """
        module = await self._module
        if not isinstance(module, nn.Module):
            raise UsageError(
                f"{self._place} of a pipeline is a {type(module).__name__}; it must be "
                "a torch.nn.Module"
            )
        return module

    def _device_of(self, module: nn.Module) -> torch.device:
        if self._device:
            return torch.device(self._device)
        first = next(module.parameters(), None)
        return torch.device("cpu") if first is None else first.device

    async def _run_of(self, step: int) -> StageRun:
        """Return a step, which may come here later than what it works on.

        Raises:
            BaseException: why it has ended, if it has.
        """
        while (run := self._runs.get(step)) is None:
            if step in self._ended:
                raise copy_of(self._ended[step])
            self._begun.clear()
            # If it never begins here, the caller is cancelled together with its step.
            await self._begun.wait()
        return run

    def _end(self, step: int, reason: BaseException) -> None:
        """Let go of a step, and tell all who wait for something of it."""
        self._ended[step] = reason
        if len(self._ended) > ENDED_MAX:
            del self._ended[next(iter(self._ended))]
        self._begun.set()
        run = self._runs.pop(step, None)
        if run is not None:
            run.let_go(reason)


def _bare(error: BaseException) -> BaseException:
    """Return an error like this one, which keeps no frame and so no tensor."""
    bare = copy_of(error).with_traceback(None)
    bare.__cause__ = bare.__context__ = None
    return bare
