"""The collector waits while frames are looked at, and is as before afterwards."""

from __future__ import annotations

import gc

import pytest

from asyncrpc.tools.inspection import collecting
from asyncrpc.tools.inspection.collecting import held_back


@pytest.fixture(autouse=True)
def runs_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collecting, "RUNS_ANYWHERE", True)


def test_collector_is_on_again_after_the_last_look() -> None:
    assert gc.isenabled()
    with held_back():
        with held_back():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_collector_turned_off_by_the_program_stays_off() -> None:
    gc.disable()
    try:
        with held_back():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()
