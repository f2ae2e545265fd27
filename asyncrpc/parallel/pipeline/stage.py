"""One stage of a pipeline, on the worker that owns its module.

A step is a call of `run` on every stage.  The call owns the stage's graphs and
gradients of the step, and lets go of them however it ends: by an error here or
elsewhere, by a deadline, or with a cancelled or dead driver.

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

The output of a stage is an argument of a call to the next stage, and the gradients of
that output are the answer to another call: neither passes through the driver, and no
stage refers to the one before it.  The first call ends when the output is in use, so
that it no longer counts against the limit of the worker's inbound bytes
(`LimitOptions.inbound_bytes_max`).

Gradients of parameters gather in the step and enter the autograd context by `commit`,
which the driver sends when every stage has computed all of its actions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import nn

from asyncrpc.core.rref.handle import RRef
from asyncrpc.core.rref.shared import copy_of
from asyncrpc.errors import AutogradError, UsageError
from asyncrpc.parallel.pipeline.schedules import StagePosition
from asyncrpc.parallel.pipeline.stage_run import StageRun, StepPlan

# Steps that have ended, and why, so that no late input waits for them.
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
            device: the device that it is on; empty: that of its first parameter.
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
        """The number of micro-batches of all steps whose graphs are here now."""
        return sum(run.machine.held for run in self._runs.values())

    async def ready(self) -> None:
        """Return when the module has been made; raise if it could not be."""
        await self._built_module()

    async def run(self, plan: Sequence[Any], **aim: Any) -> tuple[Any, ...]:
        """Do this stage's part of a step; of a training, until it is committed.

        Args:
            aim: the other fields, of the last stage; by name, for errors.
        """
        step_plan = StepPlan(*plan, **aim)
        step = step_plan.number
        reason: BaseException = AutogradError(f"step {step} is over at {self._place}")
        run: StageRun | None = None
        try:
            module = await self._built_module()
            device = self._device_of(module)
            run = StageRun(step_plan, self._place, module, device, self._following)
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
        """Take the input of a micro-batch; return when its computation has begun."""
        run = await self._run_of(step)
        run.take(chunk, value, needs)
        del value  # the graph keeps the parts that it needs
        await run.input_used(chunk)

    async def gradients(self, step: int, chunk: int) -> list[torch.Tensor | None]:
        """Return the wanted gradients of an input, once they are there."""
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

    async def _built_module(self) -> nn.Module:
        """Return the module."""
        module = await self._module
        if not isinstance(module, nn.Module):
            raise UsageError(
                f"{self._place} of a pipeline must be a torch.nn.Module, not a "
                f"{type(module).__name__}"
            )
        return module

    def _device_of(self, module: nn.Module) -> torch.device:
        if self._device:
            return torch.device(self._device)
        first = next(module.parameters(), None)
        return torch.device("cpu") if first is None else first.device

    async def _run_of(self, step: int) -> StageRun:
        """Return a step, which may come here later than its inputs."""
        while (run := self._runs.get(step)) is None:
            if step in self._ended:
                raise copy_of(self._ended[step])
            self._begun.clear()
            # If the step never begins here, the caller is cancelled together with it.
            await self._begun.wait()
        return run

    def _end(self, step: int, reason: BaseException) -> None:
        """Let go of a step, and wake all calls that wait for it."""
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
