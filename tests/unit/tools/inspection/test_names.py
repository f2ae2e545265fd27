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
    def test_variable_is_named(self) -> None:
        thing = Thing()
        assert name_in(frame_with(wanted=thing), thing) == "wanted"

    def test_attribute_is_named_with_its_object(self) -> None:
        holder, thing = Thing(), Thing()
        holder.lock = thing  # type: ignore[attr-defined]
        assert name_in(frame_with(holder=holder), thing) == "holder.lock"

    def test_item_is_named_with_its_container(self) -> None:
        thing = Thing()
        assert name_in(frame_with(holder={"left": thing}), thing) == "holder['left']"

    def test_global_variable_is_named(self) -> None:
        assert name_in(frame_with(), a_global) == "a_global"

    def test_unknown_object_has_no_name(self) -> None:
        assert name_in(frame_with(), Thing()) == ""

    def test_attribute_of_self_is_named_without_self(self) -> None:
        class Table:
            def __init__(self) -> None:
                self.lock = Thing()

            def frame(self) -> FrameType:
                return sys._getframe()  # noqa: SLF001

        table = Table()
        assert name_in(table.frame(), table.lock) == "lock"


async def test_looked_at_variable_dies_when_the_function_drops_it() -> None:
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


def test_module_keeps_its_variables() -> None:
    frames: list[FrameType] = []
    namespace: dict[str, object] = {"sys": sys, "found": frames}
    exec("kept = 1\nfound.append(sys._getframe())", namespace)  # noqa: S102
    assert locals_of(frames[0])["kept"] == 1
    assert namespace["kept"] == 1
