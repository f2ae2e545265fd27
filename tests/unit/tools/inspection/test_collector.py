"""The collector waits while frames are looked at, and is as before afterwards."""

from __future__ import annotations

import gc

import pytest

from asyncrpc.tools.inspection import collector
from asyncrpc.tools.inspection.collector import held_back


@pytest.fixture(autouse=True)
def runs_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector, "RUNS_ANYWHERE", True)


def test_it_is_on_again_when_the_last_has_looked() -> None:
    assert gc.isenabled()
    with held_back():
        with held_back():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_what_the_program_has_turned_off_stays_off() -> None:
    gc.disable()
    try:
        with held_back():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()
