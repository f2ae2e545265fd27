"""How a program calls an object; looking leaves nothing behind."""

from __future__ import annotations

import asyncio
import gc
import sys
import weakref
from types import FrameType

import pytest

from asyncrpc.tools.inspection.names import local, locals_of, name_in


class Thing:
    pass


a_global = Thing()


def frame_with(**variables: object) -> FrameType:
    """Return the frame of a function that has a variable `wanted` and `holder`."""
    wanted, holder = variables.get("wanted"), variables.get("holder")
    del variables
    frame = sys._getframe()  # noqa: SLF001
    assert wanted is None or holder is None
    return frame


class TestNames:
    def test_a_variable(self) -> None:
        thing = Thing()
        assert name_in(frame_with(wanted=thing), thing) == "wanted"

    def test_an_attribute(self) -> None:
        holder, thing = Thing(), Thing()
        holder.lock = thing  # type: ignore[attr-defined]
        assert name_in(frame_with(holder=holder), thing) == "holder.lock"

    def test_an_item(self) -> None:
        thing = Thing()
        assert name_in(frame_with(holder={"left": thing}), thing) == "holder['left']"

    def test_a_global_variable(self) -> None:
        assert name_in(frame_with(), a_global) == "a_global"

    def test_none(self) -> None:
        assert name_in(frame_with(), Thing()) == ""

    def test_of_self_only_the_attribute(self) -> None:
        class Table:
            def __init__(self) -> None:
                self.lock = Thing()

            def frame(self) -> FrameType:
                return sys._getframe()  # noqa: SLF001

        table = Table()
        assert name_in(table.frame(), table.lock) == "lock"


async def test_what_a_function_lets_go_of_dies() -> None:
    """Before Python 3.13 a frame keeps the variables that it was asked for."""
    ready, go = asyncio.Event(), asyncio.Event()
    refs = []

    async def work() -> None:
        thing = Thing()
        refs.append(weakref.ref(thing))
        ready.set()
        await go.wait()
        del thing
        ready.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await ready.wait()
    frame = task.get_coro().cr_frame  # type: ignore[union-attr]
    assert frame is not None
    assert isinstance(local(frame, "thing"), Thing)
    assert "thing" in locals_of(frame)
    ready.clear()
    go.set()
    await ready.wait()
    gc.collect()
    assert refs[0]() is None
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_a_module_keeps_its_variables() -> None:
    found: list[FrameType] = []
    namespace: dict[str, object] = {"sys": sys, "found": found}
    exec("kept = 1\nfound.append(sys._getframe())", namespace)  # noqa: S102
    assert locals_of(found[0])["kept"] == 1
    assert namespace["kept"] == 1
