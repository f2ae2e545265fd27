"""A process whose code is out of date gives way to one that has the new code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.serving.model_host.conftest import lines_of
from tests.integration.serving.model_host.web import WebWorker

NewWeb = Callable[[], WebWorker]

CODE = """
class Model:
    async def answer(self):
        return {answer}

def make_model():
    return Model()
"""


@pytest.mark.slow
def test_a_process_of_another_version_is_replaced(
    folder: Path, new_web: NewWeb
) -> None:
    """At once if it is idle, although it would have waited for an hour."""
    web = new_web()
    web.enter(version="1", linger_s=3600.0)
    web.do("leave")
    web.enter(version="2", linger_s=0.0)
    assert len(set(lines_of(folder / "made"))) == 2


def test_web_workers_of_the_old_version_continue(folder: Path, new_web: NewWeb) -> None:
    """They are served until they leave, as in a rolling reload."""
    old, new = new_web(), new_web()
    old.enter(version="1", linger_s=3600.0)
    pid = old.do("call", ("pid",))
    new.enter(version="2", linger_s=0.0)
    assert new.do("call", ("pid",)) != pid
    assert old.do("call", ("pid",)) == pid
    assert old.do("send", 4)[0] == 4 << 18
    another = new_web()
    another.enter(version="2", linger_s=0.0)
    assert another.do("call", ("pid",)) == new.do("call", ("pid",))
    old.do("leave")
    assert len(lines_of(folder / "made")) == 2


def test_a_file_that_has_changed_makes_a_process_out_of_date(
    folder: Path, new_web: NewWeb
) -> None:
    code = folder / "shop_model.py"
    code.write_text(CODE.format(answer=1), encoding="ascii")
    web = new_web()
    web.do("enter_other", (str(folder), "shop_model:make_model"))
    assert web.do("call", ("answer",)) == 1
    web.do("leave")
    web.do("enter_other", (str(folder), "shop_model:make_model"))
    assert web.do("call", ("answer",)) == 1
    first = web.do("status")[1]
    web.do("leave")
    code.write_text(CODE.format(answer="2 + 0"), encoding="ascii")
    web.do("enter_other", (str(folder), "shop_model:make_model"))
    assert web.do("call", ("answer",)) == 2
    assert web.do("status")[1] != first


@pytest.mark.slow
def test_different_names_are_different_models(folder: Path, new_web: NewWeb) -> None:
    webs = [new_web() for _ in range(2)]
    for web, name in zip(webs, ("a", "b"), strict=True):
        web.enter(name=name, linger_s=0.0)
    assert len({web.do("call", ("pid",)) for web in webs}) == 2
