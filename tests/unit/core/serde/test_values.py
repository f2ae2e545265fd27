"""Any value arrives as what it was, or the sender learns which part cannot, and why."""

import dataclasses
import datetime as dt
import decimal
import enum
import functools
import operator
import threading
import types
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np
import pytest
import torch

from asyncrpc.core.serde import Codec, FunctionTable, Limits, Policy, expose, kinds
from asyncrpc.core.serde.arrays import read_dtype
from asyncrpc.core.serde.plain import FROM_TREE
from asyncrpc.errors import DecodeError, EncodeError, Outcome, RejectedError
from tests.unit.core.serde.loopback import (
    STRICT,
    TRUSTED,
    named,
    received,
    round_trip,
    strict,
)


class Colour(enum.Enum):
    RED = 1


class Access(enum.Flag):
    READ = 1
    WRITE = 2


Point = namedtuple("Point", "x y")  # noqa: PYI024 - the untyped kind, too


@dataclasses.dataclass
class Batch:
    inputs: torch.Tensor
    note: Any


@expose
class Counter:
    def __init__(self, start: int) -> None:
        self.count = start

    def add(self, by: int) -> int:
        self.count += by
        return self.count


class Handle:
    """Stands for an RRef."""

    def __init__(self, serial: int) -> None:
        self.serial = serial


class Bulky(Handle):
    """Of a size that nothing else has, so that the next one gets the same address."""

    __slots__ = tuple(f"slot_{n}" for n in range(40))


class Fresh:
    """Pickles as a handle that lives no longer than that takes."""

    def __init__(self, serial: int) -> None:
        self.serial = serial

    def __reduce__(self) -> Any:
        return _serial_of, (Bulky(self.serial),)


def _serial_of(handle: Handle) -> int:
    return handle.serial


class HandleHooks:
    handled: tuple[type, ...] = (Handle,)

    def __init__(self) -> None:
        self.lowered: list[int] = []

    def lower(self, value: Handle) -> Any:
        self.lowered.append(value.serial)
        return ["handle", value.serial]

    def lift(self, tree: Any) -> Handle:
        return Handle(tree[1])


def with_hooks() -> tuple[Codec, HandleHooks]:
    hooks = HandleHooks()
    return Codec(FunctionTable(Policy.TRUSTED), hooks), hooks


PLAIN = [
    ([1, "a"], {}),
    (None, True, 1.5, "é\ud800", b"\x00", -(2**63), 2**64 - 1),
    (1, (2, (3, ())), []),
    {1, 2},
    frozenset("a"),
    10**40,
    -(10**40),
    1 - 2j,
    bytearray(b"x"),
    [[{"deep": [bytearray(b"y")]}]],
    slice(1, None, (2,)),
    range(3, 100, 7),
    ...,
    NotImplemented,
    {(1, 2): 3, None: 4, 1.5: 5, frozenset({1}): 6, b"k": 7},
    torch.float8_e5m2,
    torch.device("cuda:1"),
    torch.Size([1, 2]),
    torch.sparse_csr,
    torch.channels_last,
    np.float32(2),
    np.int64(-3),
    np.str_("abc"),
    np.datetime64("2024-01-02"),
    np.dtype("f4"),
    np.dtype([("a", "i4"), ("b", "f8", (2,))]),
    dt.datetime(2024, 1, 2, 3, 4, 5, 6, fold=1),  # noqa: DTZ001
    dt.datetime(2024, 1, 2, tzinfo=dt.UTC),
    dt.date(2024, 1, 2),
    dt.time(1, 2, 3),
    dt.timedelta(1, 2, 3),
    b"x" * 100_000,
    [b"y" * 50_000, {"z": bytearray(70_000)}],
]
NAMED = [len, torch.add, torch.relu, torch.nn.Linear, int, operator.add]
PICKLED = [
    decimal.Decimal("1.5"),
    Point(1, [2]),
    OrderedDict(a=1),
    Access.READ | Access.WRITE,
    dt.datetime(2024, 1, 2, tzinfo=dt.timezone(dt.timedelta(hours=2), "X")),
]


@pytest.mark.parametrize("value", [*PLAIN, Colour.RED, *NAMED, *PICKLED], ids=named)
def test_value_returns_unchanged(value: Any) -> None:
    back = round_trip(value)
    assert type(back) is type(value)
    assert back == value


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: repr(value)[:40])
def test_strict_codec_takes_every_value_that_needs_no_pickle(value: Any) -> None:
    back = round_trip(value, STRICT)
    assert type(back) is type(value)
    assert back == value


def test_types_are_kept_at_any_depth() -> None:
    back = round_trip([{"a": [bytearray(b"x"), (1,), {2}]}] * 300)
    assert [type(part) for part in back[299]["a"]] == [bytearray, tuple, set]


@pytest.mark.parametrize("args", [[], [torch.ones(2)]], ids=["none", "a tensor"])
def test_value_shaped_like_arguments_keeps_its_types(args: list[Any]) -> None:
    assert type(round_trip([args, OrderedDict()])[1]) is OrderedDict


def test_view_of_memory_arrives_as_bytes() -> None:
    assert round_trip([memoryview(b"abc"), memoryview(b"x" * 20_000)[::2]]) == [
        b"abc",
        b"x" * 10_000,
    ]


def test_long_byte_strings_are_sent_without_a_copy() -> None:
    data = b"x" * 20_000
    encoded = TRUSTED.encode([[{"a": data}], data])
    assert [view.obj for view in encoded.buffers] == [data]  # once, though used twice
    assert len(encoded.control) < 100
    assert encoded.bytes_copied == 0


def test_repeated_object_arrives_as_one() -> None:
    batch, tensor = Batch(torch.ones(2), None), torch.zeros(3)
    first, two, three, four = round_trip([batch, batch, tensor, (tensor,)])
    assert first is two
    assert three is four[0]


def test_container_that_contains_itself_arrives_so() -> None:
    cycle: list[Any] = [torch.ones(2)]
    cycle.append(cycle)
    back = round_trip((cycle, {}))[0]
    assert back[1] is back
    assert torch.equal(back[0], torch.ones(2))


def test_strict_codec_refuses_a_cycle() -> None:
    cycle: dict[str, Any] = {}
    cycle["self"] = cycle
    with pytest.raises(EncodeError, match="nor contain themselves"):
        STRICT.encode(cycle)


def test_strict_codec_takes_containers_within_the_depth_limit() -> None:
    value: Any = 1
    for _ in range(60):
        value = (value,)
    assert round_trip(value, STRICT) == value
    for _ in range(10):
        value = [(value,)]
    with pytest.raises(EncodeError, match="deeper than 64"):
        STRICT.encode(value)
    assert round_trip(value) == value


# --- what has power ------------------------------------------------------------------


def test_bound_method_takes_its_instance_along() -> None:
    assert round_trip(Counter(5).add)(2) == 7
    assert round_trip([torch.ones(2).add])[0](1).tolist() == [2, 2]


def unnamed_decorator(function: Any) -> Any:
    def wrapper(self: Any) -> str:
        return str(function(self))

    return wrapper


class Decorated:
    def wrapper(self) -> str:
        return "another method"

    @unnamed_decorator
    def right(self) -> str:
        return "right"

    def base(self) -> str:
        return "base"


class Overriding(Decorated):
    def base(self) -> str:
        return "overridden"

    def inherited(self) -> Any:
        return super().base


@pytest.mark.parametrize("pickles", [True, False])
def test_bound_method_arrives_as_the_one_sent(pickles: bool) -> None:  # noqa: FBT001
    methods = [Decorated().right, Decorated().wrapper, Overriding().base]
    if not pickles:
        methods = [Colour.RED.__str__]
    for method in methods:
        encoded = TRUSTED.encode(method, pickles=pickles)
        assert TRUSTED.decode(encoded.control, received(encoded))() == method()


def test_base_class_method_is_not_replaced_by_its_override() -> None:
    assert round_trip(Overriding().inherited())() == "base"
    text = "no attribute of that leads to it; send the function itself"
    bound = types.MethodType(Decorated.base, Colour.RED)
    with pytest.raises(EncodeError, match=text):
        TRUSTED.encode(bound, pickles=False)


def test_partial_takes_its_arguments_along() -> None:
    back = round_trip(functools.partial(torch.add, torch.ones(2), alpha=2))
    assert back(torch.ones(2)).tolist() == [3, 3]


def test_strict_codec_refuses_a_method_of_a_pickled_instance() -> None:
    with pytest.raises(EncodeError, match=r"Counter travels only as a pickle"):
        STRICT.encode(Counter(5).add)


def test_strict_codec_takes_permitted_methods_only() -> None:
    encoded = TRUSTED.encode(torch.ones(2).add, pickles=False)
    with pytest.raises(RejectedError, match=r"Tensor\.add is not exposed") as caught:
        STRICT.decode(encoded.control, received(encoded))
    assert caught.value.outcome is Outcome.NOT_EXECUTED
    allowed = strict("torch:Tensor.add")
    assert allowed.decode(encoded.control, received(encoded))(1).tolist() == [2, 2]


def test_strict_codec_never_unpickles() -> None:
    encoded = TRUSTED.encode([decimal.Decimal(1)])
    with pytest.raises(RejectedError, match="a pickle arrived"):
        STRICT.decode(encoded.control)


def test_strict_codec_refuses_unexposed_functions() -> None:
    encoded = TRUSTED.encode([torch.add])
    with pytest.raises(RejectedError, match="expose"):
        STRICT.decode(encoded.control)
    assert strict("torch:add").decode(encoded.control) == [torch.add]
    assert STRICT.decode(TRUSTED.encode([int]).control) == [int]


def test_user_extension_cannot_smuggle_a_pickle() -> None:
    """A web client's msgpack, passed on, has no power over the callee."""
    inner = TRUSTED.encode([decimal.Decimal(1)]).control
    for code in range(128):
        forged = msgpack.ExtType(code, inner)
        try:
            back = round_trip([forged])
        except DecodeError:
            continue
        assert not isinstance(back[0], decimal.Decimal)


def test_references_go_through_the_hooks_once_each() -> None:
    codec, hooks = with_hooks()
    handle = Handle(7)
    value = [handle, (handle,), Batch(torch.ones(1), handle)]
    first, (second,), batch = round_trip(value, codec)
    assert hooks.lowered == [7]
    assert first.serial == 7
    assert first is second is batch.note


def test_short_lived_object_is_not_taken_for_an_earlier_one() -> None:
    codec, _ = with_hooks()
    numbers = list(range(20))
    assert round_trip([Fresh(n) for n in numbers], codec) == numbers


def test_trial_encoding_calls_no_hook() -> None:
    codec, hooks = with_hooks()
    assert codec.encoded_bytes([Handle(1)]) is None  # counted in calls only
    assert codec.encoded_bytes(threading.Lock()) is None
    assert hooks.lowered == []


def test_reference_without_hooks_is_refused() -> None:
    encoded = with_hooks()[0].encode(Handle(1))
    with pytest.raises(DecodeError, match="reference"):
        TRUSTED.decode(encoded.control)


# --- errors --------------------------------------------------------------------------


class Stubborn:
    def __reduce__(self) -> Any:
        raise LookupError("no")


class Exploding:
    def __reduce__(self) -> Any:
        return _explode, ()


def _explode() -> None:
    raise SystemExit(3)


def test_error_names_the_path_of_the_value() -> None:
    value: Any = ([0, {"x": Batch(torch.ones(1), threading.Lock())}], {})
    with pytest.raises(EncodeError) as caught:
        TRUSTED.encode(value, labels=("args", "kwargs"))
    text = str(caught.value)
    assert "args[1]['x'].note" in text
    assert "cannot be pickled" in text
    assert caught.value.outcome is Outcome.NOT_EXECUTED


class Making:
    """Is sent as what its reduction makes."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make

    def __reduce__(self) -> Any:
        return list, ([self.make()],)


def nested_deep() -> list[Any]:
    nested: list[Any] = []
    for _ in range(100_000):  # CPython 3.13 pickles some 3,000
        nested = [nested]
    return nested


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        (nested_deep(), "nested too deep"),
        (Making(nested_deep), "nested too deep"),
        (Making(threading.Lock), "lock cannot be pickled"),
    ],
)
def test_error_names_argument_of_a_value_without_a_path(part: Any, reason: str) -> None:
    beside = Batch(torch.ones(1), None)
    value = [[beside, len, nested_deep], {"fine": beside, "wrong": part}]
    with pytest.raises(EncodeError, match=reason) as caught:
        TRUSTED.encode(value, labels=("args", "kwargs"))
    assert "kwargs['wrong']: " in str(caught.value)


def test_error_tells_the_function_from_its_arguments() -> None:
    labels = ("function, args", "kwargs")
    lock = threading.Lock()
    for value, where in (
        ([Batch(torch.ones(1), lock), 1], "function.note"),
        ([len, Batch(torch.ones(1), lock)], r"args\[0\].note"),
        ([len, 1, lock], r"args\[1\]"),
    ):
        with pytest.raises(EncodeError, match=f"cannot be sent: {where}: a .*lock"):
            TRUSTED.encode([value, {}], labels=labels)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (threading.Lock(), "lock"),
        (Stubborn(), "LookupError: no"),
        ((x for x in "a"), "generator"),
        (functools, "module"),
    ],
)
def test_unencodable_value_is_refused_before_sending(value: Any, text: str) -> None:
    with pytest.raises(EncodeError, match=text):
        TRUSTED.encode([value])


@pytest.mark.parametrize("value", [Point(1, 2), Batch(torch.ones(1), 0), Counter(1)])
def test_strict_codec_names_the_value_that_needs_a_pickle(value: Any) -> None:
    with pytest.raises(EncodeError, match=r"value\[1\]\['x'\].*strict"):
        STRICT.encode([0, {"x": value}])


def test_code_of_a_peer_cannot_end_the_program() -> None:
    encoded = TRUSTED.encode(Exploding())
    with pytest.raises(DecodeError, match="SystemExit"):
        TRUSTED.decode(encoded.control)


@pytest.mark.parametrize("length", [10, 5000])
def test_plain_value_of_any_length_has_no_buffers(length: int) -> None:
    value = [[[number, 1, 1] for number in range(length)], "a"]
    control = TRUSTED.encode_plain(value)
    assert TRUSTED.decode(control) == value
    assert STRICT.decode(control) == value  # it has no pickle


def test_control_part_over_the_limit_is_refused_on_both_sides() -> None:
    small = strict(limits=Limits(control_bytes_max=100))
    with pytest.raises(EncodeError, match="put large data into tensors"):
        small.encode(["x" * 200])
    with pytest.raises(DecodeError, match="the limit is 100"):
        small.decode(TRUSTED.encode(["x" * 200]).control)


def test_too_many_objects_are_refused_on_both_sides() -> None:
    small = strict(limits=Limits(objects_max=2))
    tensors = [torch.ones(1) for _ in range(3)]
    with pytest.raises(EncodeError, match="at most 2"):
        small.encode(tensors)
    encoded = TRUSTED.encode(tensors)
    with pytest.raises(DecodeError, match="too long"):
        small.decode(encoded.control, received(encoded))


@pytest.mark.parametrize(
    "control",
    [
        b"",
        b"\x00\x00\x00",
        b"\xff\x00\x00\x00\x01",
        kinds.FLAT + b"\xc1",
        kinds.FLAT + b"\x01\x02",
        kinds.FLAT_TUPLE + b"\x01",
        kinds.FLAT + b"\x91" * 2000 + b"\x01",
        kinds.FLAT + b"\x81\x90\x01",  # a list as a key
        kinds.FLAT + msgpack.packb(msgpack.ExtType(kinds.REFERENCE, b"\x05")),
        kinds.FLAT + msgpack.packb(msgpack.ExtType(kinds.RANGE, b"\x93\x01\x02\x00")),
        kinds.FLAT
        + msgpack.packb(msgpack.ExtType(kinds.BYTEARRAY, msgpack.packb(1 << 40))),
        kinds.FLAT
        + msgpack.packb(
            msgpack.ExtType(kinds.NUMPY_SCALAR, msgpack.packb(["|O", b"x" * 8]))
        ),
    ],
)
def test_malformed_bytes_are_refused(control: bytes) -> None:
    with pytest.raises(DecodeError):
        TRUSTED.decode(control)


@pytest.mark.parametrize(
    "text",
    [
        *("3i8", "8i8", "f4,f4", "(2,)f4", "float32", "f4", "i8; import os", "O", "|O"),
        *("<M8[s] ", "a:b", "", "<", "<f4\n", "V8", "bool"),
    ],
)
def test_numpy_dtype_is_accepted_in_a_single_form(text: str) -> None:
    """numpy compiles some of these as Python; ours are what `dtype.str` gives."""
    with pytest.raises(DecodeError, match="numpy dtype"):
        read_dtype(text)


def test_repr_of_a_peer_value_is_never_called() -> None:
    """It may be long, or run code of the object's own."""

    class Loud:
        def __repr__(self) -> str:
            raise AssertionError("it was")

    for description in (Loud(), [Loud()], [["a", Loud()]]):
        with pytest.raises(DecodeError, match="is not a numpy dtype"):
            read_dtype(description)
    with pytest.raises(DecodeError, match="the name of a dtype is a Loud"):
        FROM_TREE[kinds.TORCH_DTYPE](Loud())
