"""An exception is raised at the caller as what it was, and as a RemoteError."""

import asyncio
import builtins
import json
import os
import pickle
import subprocess
import threading
from collections.abc import Callable
from typing import Any, NoReturn

import pytest
import torch

from asyncrpc.core.serde import (
    Codec,
    describe_exception,
    expose,
    rebuild_exception,
)
from asyncrpc.errors import (
    CallError,
    DeadlineExceededError,
    DecodeError,
    EncodeError,
    Outcome,
    OverloadedError,
    OwnerLostError,
    RemoteError,
    UsageError,
)
from tests.unit.core.serde.loopback import STRICT, TRUSTED, received, round_trip


class TwoArguments(Exception):  # noqa: N818
    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{reason} ({code})")
        self.code = code
        self.reason = reason


class Slotted(Exception):  # noqa: N818
    __slots__ = ("detail",)

    def __init__(self, detail: str) -> None:
        super().__init__()
        self.detail = detail

    def __str__(self) -> str:
        return f"slot {self.detail}"


class KeywordOnly(OSError):  # noqa: N818
    def __init__(self, *, path: str) -> None:
        super().__init__(2, "missing", path)
        self.path = path


@expose
class Exposed(Exception):  # noqa: N818
    pass


class Hidden(Exception):  # noqa: N818
    pass


def fail(error: BaseException) -> NoReturn:
    raise error


def raised(error: BaseException) -> BaseException:
    try:
        fail(error)
    except BaseException as caught:  # noqa: BLE001
        return caught


def at_caller(
    error: BaseException, codec: Codec = TRUSTED, worker: str = "ps"
) -> RemoteError:
    """Return what a caller gets when a function on `worker` raises `error`."""
    tree = describe_exception(error, codec, worker=worker, pid=os.getpid())
    encoded = codec.encode(tree)
    arrived = codec.decode(encoded.control, received(encoded))
    return rebuild_exception(arrived, codec.functions, function="app:step", to=worker)


def _unicode_error() -> UnicodeDecodeError:
    return UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")


def _json_error() -> json.JSONDecodeError:
    return json.JSONDecodeError("bad", '{"', 1)


ERRORS: list[Callable[[], BaseException]] = [
    lambda: ValueError("é \\u0041 \\n \n \ud800"),
    lambda: KeyError("name"),
    ValueError,
    lambda: ValueError("a", 1),
    lambda: FileNotFoundError(2, "No such file", "x.txt"),
    lambda: OSError("plain"),
    lambda: TimeoutError("late"),
    lambda: ConnectionResetError(104, "reset"),
    _unicode_error,
    lambda: UnicodeEncodeError("ascii", "é", 0, 1, "no"),
    lambda: ImportError("no module", name="x", path="/x"),
    lambda: ModuleNotFoundError("no module", name="x"),
    lambda: SyntaxError("bad", ("f.py", 3, 4, "text")),
    lambda: ZeroDivisionError("division by zero"),
    lambda: NameError("no", name="x"),
    lambda: TwoArguments(3, "why"),
    lambda: Slotted("in"),
    lambda: KeywordOnly(path="/p"),
    _json_error,
    lambda: subprocess.CalledProcessError(3, ["ls"], b"out"),
    lambda: torch.OutOfMemoryError("out of memory"),
    lambda: asyncio.InvalidStateError("state"),
    lambda: UsageError("wrong"),
    lambda: OwnerLostError(worker="w", incarnation=5, reason="killed"),
]


@pytest.mark.parametrize("make", ERRORS, ids=lambda make: type(make()).__name__)
def test_exception_arrives_as_both_types_with_text_and_fields(
    make: Callable[[], BaseException],
) -> None:
    error = raised(make())
    back = at_caller(error)
    assert isinstance(back, RemoteError)
    assert isinstance(back, type(error))
    assert str(back) == str(error)
    assert back.args == error.args
    for name in ("errno", "strerror", "filename", "value", "name", "path", "lineno"):
        if hasattr(error, name):
            assert getattr(back, name) == getattr(error, name)
    for name, value in vars(error).items():
        assert getattr(back, name) == value
    assert (back.function, back.to) == ("app:step", "ps")
    assert back.outcome is Outcome.EXECUTED
    own = vars(error).get("worker", "ps")  # an OwnerLostError names the owner
    assert (back.worker, back.pid) == (own, os.getpid())
    name = f"{type(error).__module__}.{type(error).__qualname__}"
    assert back.remote_type == name
    assert "def raised" not in back.remote_traceback
    assert "raise error" in back.remote_traceback
    note = back.__notes__[-1]
    assert note.startswith(f"--- on worker 'ps' (pid {os.getpid()}) ---\nTraceback")


def test_overload_rejection_costs_no_traceback() -> None:
    caught = at_caller(raised(OverloadedError("too much", retry_after_s=2.5)))
    assert isinstance(caught, OverloadedError)
    assert caught.retry_after_s == 2.5
    assert caught.remote_traceback == "OverloadedError: too much\n"


BUILTIN_ARGS: dict[str, tuple[Any, ...]] = {
    "UnicodeDecodeError": ("utf8", b"x", 0, 1, "why"),
    "UnicodeEncodeError": ("utf8", "x", 0, 1, "why"),
    "UnicodeTranslateError": ("x", 0, 1, "why"),
    "ExceptionGroup": ("text", [ValueError(1)]),
    "BaseExceptionGroup": ("text", [ValueError(1)]),
}
BUILTINS = [
    error
    for error in vars(builtins).values()
    if isinstance(error, type)
    and issubclass(error, Exception)
    and not issubclass(error, (StopIteration, StopAsyncIteration))
]


@pytest.mark.parametrize("kind", BUILTINS)
def test_each_builtin_exception_arrives_as_itself(kind: type[Exception]) -> None:
    error = kind(*BUILTIN_ARGS.get(kind.__name__, ("text",)))
    tree = describe_exception(error, TRUSTED, worker="ps", pid=1)
    got = rebuild_exception(tree, TRUSTED.functions, function="f", to="ps")
    assert isinstance(got, kind)
    assert str(got) == str(error)
    as_value = round_trip([error, Holder(error)])
    assert type(as_value[0]) is kind
    assert as_value[1].error is as_value[0]


class Holder:
    def __init__(self, error: Exception) -> None:
        self.error = error


def test_slots_of_a_user_class_survive() -> None:
    assert vars(Slotted)["detail"].__get__(at_caller(Slotted("in"))) == "in"


def test_exception_classes_are_created_once_per_worker() -> None:
    assert type(at_caller(ValueError())) is type(at_caller(ValueError()))


def test_library_error_keeps_class_and_fields_and_names_this_call() -> None:
    error = DeadlineExceededError(
        function="inner", to="db", outcome=Outcome.UNKNOWN, timeout_s=2.5
    )
    back = at_caller(error)
    assert isinstance(back, DeadlineExceededError)
    assert isinstance(back, TimeoutError)
    assert back.timeout_s == 2.5
    assert str(back) == str(error)
    assert (back.function, back.to) == ("app:step", "ps")
    assert back.outcome is Outcome.EXECUTED
    assert isinstance(at_caller(CallError("x", function="inner", to="db")), CallError)


@pytest.mark.parametrize(
    "error",
    [
        SystemExit(3),
        KeyboardInterrupt(),
        asyncio.CancelledError("x"),
        StopIteration(5),
        StopAsyncIteration(),
    ],
)
def test_exception_that_would_end_the_caller_arrives_as_remote_error(
    error: BaseException,
) -> None:
    back = at_caller(error)
    assert type(back) is RemoteError
    assert type(error).__name__ in str(back)


def test_unavailable_class_leaves_its_name_and_text() -> None:
    class Local(Exception):  # noqa: N818
        pass

    back = at_caller(raised(Local("oops")), STRICT)
    assert type(back) is RemoteError
    assert "Local: oops" in str(back)
    assert back.remote_message == "oops"
    assert "oops" in back.remote_traceback


def test_strict_worker_rebuilds_permitted_classes_only() -> None:
    assert isinstance(at_caller(Exposed("x"), STRICT), Exposed)
    assert isinstance(at_caller(KeyError("x"), STRICT), KeyError)
    assert isinstance(at_caller(UsageError("x"), STRICT), UsageError)
    back = at_caller(Hidden("x"), STRICT)
    assert type(back) is RemoteError
    assert "Hidden: x" in str(back)
    relayed = at_caller(at_caller(KeyError("x"), STRICT), STRICT, worker="middle")
    assert isinstance(relayed, KeyError)
    assert (relayed.worker, relayed.to) == ("ps", "middle")


def test_unencodable_attribute_is_left_out_and_noted() -> None:
    error = ValueError("kept", threading.Lock())
    error.fine = [1]  # type: ignore[attr-defined]
    error.lock = threading.Lock()  # type: ignore[attr-defined]
    back = at_caller(error)
    assert back.args[0] == "kept"
    assert "could not travel" in back.args[1]
    assert back.fine == [1]  # type: ignore[attr-defined]
    assert not hasattr(back, "lock")
    assert "args[1], lock" in back.__notes__[0]


def test_notes_come_first_and_the_remote_traceback_last() -> None:
    error = ValueError("x")
    error.add_note("one")
    error.add_note("two")
    back = at_caller(error)
    assert back.__notes__[:2] == ["one", "two"]
    assert back.__notes__[2].startswith("--- on worker")
    assert len(back.__notes__) == 3


def test_causes_and_contexts_are_rebuilt() -> None:
    def fail_twice() -> None:
        try:
            fail(KeyError("inner"))
        except KeyError as error:
            raise ValueError("outer") from error

    try:
        try:
            fail_twice()
        except ValueError:
            raise TypeError("last")  # noqa: B904
    except TypeError as caught:
        back = at_caller(caught)
    assert back.__cause__ is None
    assert isinstance(back.__context__, ValueError)
    assert isinstance(back.__context__, RemoteError)
    assert isinstance(back.__context__.__cause__, KeyError)
    assert back.__context__.__suppress_context__
    assert "inner" in back.remote_traceback


def test_suppressed_context_stays_suppressed() -> None:
    error = ValueError("x")
    error.__context__ = KeyError("y")
    error.__suppress_context__ = True
    back = at_caller(error)
    assert back.__suppress_context__
    assert isinstance(back.__context__, KeyError)


def test_long_and_cyclic_chains_end() -> None:
    first = error = ValueError("0")
    for n in range(1, 100):
        error.__cause__ = ValueError(str(n))
        error = error.__cause__
    error.__cause__ = first
    link: BaseException | None = at_caller(first)
    count = 0
    while link is not None:
        link, count = link.__cause__, count + 1
    assert 10 < count < 30


def test_exception_group_keeps_its_members() -> None:
    group = ExceptionGroup(
        "several", [ValueError("a"), ExceptionGroup("inner", [KeyError("b")])]
    )
    back = at_caller(raised(group))
    assert isinstance(back, ExceptionGroup)
    assert isinstance(back, RemoteError)
    assert str(back) == str(group)
    first, inner = back.exceptions
    assert isinstance(first, ValueError)
    assert isinstance(first, RemoteError)
    assert isinstance(inner, ExceptionGroup)
    assert isinstance(inner.exceptions[0], KeyError)
    assert_still_splits(back)


def assert_still_splits(group: ExceptionGroup[Any]) -> None:
    caught = []
    try:
        raise group
    except* ValueError as values:
        caught.append(len(values.exceptions))
    except* KeyError as names:
        caught.append(len(names.exceptions))
    assert caught == [1, 1]


def test_group_of_exits_does_not_end_the_caller() -> None:
    back = at_caller(BaseExceptionGroup("exits", [SystemExit(1), ValueError("x")]))
    assert isinstance(back, RemoteError)
    assert isinstance(back, BaseExceptionGroup)
    assert not any(isinstance(each, SystemExit) for each in back.exceptions)


class Mute(Exception):  # noqa: N818
    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_exception_without_text_is_described() -> None:
    assert "could not be read" in str(at_caller(Mute()))


# --- further hops --------------------------------------------------------------------


def test_origin_is_kept_over_two_hops() -> None:
    near = at_caller(raised(TwoArguments(3, "why")), worker="far")
    near.add_note("seen in the middle")
    back = at_caller(raised(near), worker="middle")
    assert isinstance(back, TwoArguments)
    assert isinstance(back, RemoteError)
    assert str(back) == "why (3)"
    assert (back.worker, back.to) == ("far", "middle")
    assert back.remote_type.endswith(".TwoArguments")
    assert "raise error" in back.remote_traceback
    text = "".join(back.__notes__)
    assert text.count("--- on worker 'far'") == 1
    assert text.count("--- on worker 'middle'") == 1
    assert "seen in the middle" in text


def test_text_of_an_unknown_exception_is_kept_over_two_hops() -> None:
    class Local(Exception):  # noqa: N818
        pass

    near = at_caller(Local("oops"), STRICT, worker="far")
    back = at_caller(raised(near), STRICT, worker="middle")
    assert type(back) is RemoteError
    assert back.remote_message == "oops"
    assert "Local: oops" in str(back)


@pytest.mark.parametrize("make", ERRORS, ids=lambda make: type(make()).__name__)
def test_remote_exception_can_be_pickled(make: Callable[[], BaseException]) -> None:
    back = at_caller(raised(make()))
    back.__cause__ = at_caller(KeyError("cause"))
    clone = pickle.loads(pickle.dumps(back))
    assert isinstance(clone, RemoteError)
    assert isinstance(clone, type(make()))
    assert str(clone) == str(back)
    assert (clone.args, clone.worker) == (back.args, back.worker)
    assert clone.__notes__ == back.__notes__
    assert isinstance(clone.__cause__, KeyError)


def test_remote_exception_travels_as_a_value() -> None:
    back = round_trip([at_caller(TwoArguments(3, "why"))])[0]
    assert isinstance(back, TwoArguments)
    assert isinstance(back, RemoteError)
    assert back.reason == "why"


@pytest.mark.parametrize("make", ERRORS, ids=lambda make: type(make()).__name__)
def test_exception_as_a_value_returns_as_its_type(
    make: Callable[[], BaseException],
) -> None:
    error = make()
    back = round_trip([error])[0]
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert back.args == error.args


def test_exception_as_a_value_needs_no_pickle() -> None:
    back = round_trip([KeyError("x"), ExceptionGroup("g", [ValueError(1)])], STRICT)
    assert back[0].args == ("x",)
    assert back[1].exceptions[0].args == (1,)
    error = CallError("x", outcome=Outcome.EXECUTED)
    assert round_trip([error], STRICT)[0].outcome is Outcome.EXECUTED
    with pytest.raises(EncodeError):
        STRICT.encode([at_caller(KeyError("x"))])


def test_own_attribute_survives_two_hops() -> None:
    error = OwnerLostError(worker="w", incarnation=5, reason="killed")
    back = at_caller(at_caller(error), worker="middle")
    assert isinstance(back, OwnerLostError)
    assert (back.worker, back.to) == ("w", "middle")
    assert back.incarnation == 5


# --- hostile trees -------------------------------------------------------------------


def good() -> dict[str, Any]:
    return describe_exception(ValueError("x"), TRUSTED, worker="ps", pid=1)


@pytest.mark.parametrize("key", sorted(good()))
@pytest.mark.parametrize("value", [5, None, ["x"], {"a": 1}])
def test_malformed_exception_tree_is_refused_or_harmless(key: str, value: Any) -> None:
    tree = good()
    tree[key] = value
    try:
        back = rebuild_exception(tree, TRUSTED.functions, function="f", to="ps")
    except DecodeError:
        return
    assert isinstance(back, RemoteError)


def test_value_that_is_not_a_tree_is_refused() -> None:
    trees: list[Any] = [None, [], {}, 5, "x"]
    for tree in trees:
        with pytest.raises(DecodeError, match="malformed description"):
            rebuild_exception(tree, TRUSTED.functions, function="f", to="ps")
