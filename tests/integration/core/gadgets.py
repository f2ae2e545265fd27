"""Bytes that would run something on a worker that believed them.

Each gadget is one message of a peer that has authenticated.  Those which would leave a
trace leave it at `SENTINEL`.
"""

from __future__ import annotations

import os
import pickle
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgpack

from asyncrpc import expose
from asyncrpc.core.wire.frames import FrameKind, prefix

MODULE = __name__
SENTINEL = Path(tempfile.gettempdir()) / f"asyncrpc-gadget-{os.getpid()}"
COMMAND = f"touch {SENTINEL}"


def trace(*_args: Any, **_kwargs: Any) -> None:
    """Leave the trace; not exposed."""
    SENTINEL.touch()


def _private() -> None:
    SENTINEL.touch()


class Plain:
    """A class of this program that peers may not use."""

    def method(self) -> None:
        SENTINEL.touch()


class Unpickled:
    """What runs a command when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (COMMAND,)


@expose
class Exposed:
    """A class that peers may use, and all that they may not use of it."""

    def __init__(self) -> None:
        self.held = trace
        self.count = 0

    def method(self) -> int:
        self.count += 1
        return 41 + self.count

    def _private(self) -> None:
        SENTINEL.touch()

    @property
    def computed(self) -> Any:
        SENTINEL.touch()
        return trace

    def __call__(self) -> None:
        SENTINEL.touch()

    def __getattr__(self, name: str) -> Any:
        SENTINEL.touch()
        return trace


@expose
class ExposedError(Exception):
    """An exception that peers may name."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("__class__", "__dict__", "__init__", "__reduce__"):
            SENTINEL.touch()
        super().__setattr__(name, value)


@expose
def exposed(*args: Any, **kwargs: Any) -> int:
    """Let anybody call this, with anything."""
    return len(args) + len(kwargs)


@expose
def make() -> Exposed:
    """Let anybody make an object that stays here."""
    return Exposed()


def make_plain() -> Plain:
    """Make an object of a class that is not exposed; the test allows it by name."""
    return Plain()


class Gadget(NamedTuple):
    """One message: what it tries, and its bytes."""

    what: str
    message: bytes


def ext(code: int, tree: Any) -> msgpack.ExtType:
    return msgpack.ExtType(code, msgpack.packb(tree, strict_types=True))


def ref(index: int) -> msgpack.ExtType:
    return msgpack.ExtType(0, struct.pack("<I", index))


def value(tree: Any, *entries: list[Any], header: int = 0) -> bytes:
    """Return a control part, whatever it says."""
    table = msgpack.packb(list(entries)) if entries else b""
    control: bytes = (
        struct.pack("<I", len(table) | header) + table + msgpack.packb(tree)
    )
    return control


def frame(kind: int, head: Any, control: bytes, *buffers: bytes) -> bytes:
    return prefix(
        kind,
        77,
        aux=-1 if kind == FrameKind.REQUEST else 0,
        head=msgpack.packb(head),
        control=control,
        lengths=[len(buffer) for buffer in buffers],
        payload_bytes=sum(map(len, buffers)),
    ) + b"".join(buffers)


def request(
    args: list[Any],
    *entries: list[Any],
    target: Any = (0, f"{MODULE}:exposed"),
    meta: Any = None,
    buffers: tuple[bytes, ...] = (),
) -> bytes:
    """Return a request for the exposed function, if no other is named."""
    control = value([args, {}], *entries)
    return frame(FrameKind.REQUEST, [target, meta], control, *buffers)


NAMES = (
    *("os:system", "posix:system", "subprocess:run", "subprocess:Popen", "os:popen"),
    *("builtins:eval", "builtins:exec", "builtins:__import__", "builtins:compile"),
    *("builtins:getattr", "builtins:open", "builtins:type", "builtins:object"),
    *("builtins:breakpoint", "builtins:vars", "builtins:bytes", "builtins:print"),
    *("importlib:import_module", "runpy:run_path", "pickle:loads", "_pickle:loads"),
    *("marshal:loads", "types:FunctionType", "types:CodeType", "ctypes:CDLL"),
    *("functools:partial", "functools:reduce", "operator:attrgetter", "code:interact"),
    *("operator:methodcaller", "shutil:rmtree", "pty:spawn", "webbrowser:open"),
    *("timeit:timeit", "this:s", "antigravity:fly", "gadget_bait:run"),
    *("torch:load", "torch.hub:load", "torch.serialization:load", "torch:save"),
    *("torch.utils.cpp_extension:load_inline", "torch.jit:load", "torch:Tensor.tofile"),
    *("torch:nn.modules.module.Module", "torch.nn:Module.apply", "torch:ops.load"),
    *("torch.storage:_load_from_bytes", "torch._utils:_rebuild_tensor", "numpy:load"),
    *("numpy:fromfile", "numpy.testing._private.utils:runstring", "numpy:memmap"),
    *(
        "asyncrpc:Worker",
        "asyncrpc.core.serde.pickling:load",
        "asyncrpc.core.nn.owner:create",
    ),
    *("asyncrpc.multiprocessing:launch", "asyncrpc:share", "asyncrpc.api:init_rpc"),
    *(
        "asyncrpc.core.serde.functions:expose",
        "asyncrpc.core.serde:expose",
        "asyncrpc:expose",
    ),
    *("__main__:trace", "__mp_main__:trace", "sys:exit", "os:_exit", "os:kill"),
    *(f"{MODULE}:{name}" for name in ("trace", "_private", "Plain", "Plain.method")),
    *(f"{MODULE}:{name}" for name in ("os.system", "pickle.loads", "SENTINEL.touch")),
    *(f"{MODULE}:Exposed.{name}" for name in ("_private", "__init__", "__class__")),
    *(
        f"{MODULE}:Exposed.{name}"
        for name in ("__reduce_ex__", "__subclasses__", "mro")
    ),
    *(f"{MODULE}:Exposed.{name}" for name in ("computed", "computed.fget", "held")),
    *(f"{MODULE}:Exposed.method.__{name}__" for name in ("globals", "code", "class")),
    *(f"{MODULE}:exposed.__{name}__" for name in ("globals", "builtins", "call")),
    *(f"{MODULE}:Exposed.__init__.__globals__", f"{MODULE}:Exposed.__class__.__call__"),
    *(f"{MODULE}:Exposed.__base__.__subclasses__", f"{MODULE}:__builtins__"),
    *(f"{MODULE}:__loader__", f"{MODULE}:__spec__", f"{MODULE}:Gadget", f"{MODULE}:"),
    *("", ":", "a:", ":b", "a:b:c", "\0:\0", "..:x", " :eval", "builtins: eval"),
    *("builtins:eval ", "builtins.:eval", "x" * 50_000, "a:" + "b." * 20_000),
)


def by_name() -> Iterator[Gadget]:
    """Call by name, pass as an argument, call a value, wrap in a partial."""
    for name in NAMES:
        entry = [8, name]
        yield Gadget(f"call {name:.40}", request([COMMAND], target=[0, name]))
        yield Gadget(f"call numbered {name:.40}", request([COMMAND], target=[9, name]))
        yield Gadget(f"pass {name:.40}", request([ref(0)], entry))
        yield Gadget(
            f"value {name:.40}", request([ref(0), COMMAND], entry, target=None)
        )
        partial = [10, msgpack.packb([ref(0), [COMMAND], {}])]
        yield Gadget(
            f"partial {name:.40}", request([ref(1)], entry, partial, target=None)
        )
        yield Gadget(f"enum {name:.40}", request([ref(0)], [11, name, "run"]))
        packed = msgpack.packb([[COMMAND], {}, {}])
        yield Gadget(f"error {name:.40}", request([ref(0)], [12, name, packed]))


def by_pickle() -> Iterator[Gadget]:
    """Have something unpickled, in each place where a pickle can be."""
    data = pickle.dumps(Unpickled())
    yield Gadget("pickle", request([ref(0)], [7, data, []]))
    yield Gadget("pickle in a buffer", request([ref(0)], [7, 0, []], buffers=(data,)))
    yield Gadget("unused pickle", request([], [7, data, []]))
    yield Gadget(
        "pickle as the callable", request([ref(0)], [7, data, []], target=None)
    )
    for service, method in (("optim", "create"), ("autograd", "advance")):
        control = value([1, ref(0)], [7, data, []])
        yield Gadget(service, frame(FrameKind.SERVICE, [service, method], control))
    notice = frame(FrameKind.NOTICE, ["rref", "gone"], value(ref(0), [7, data, []]))
    yield Gadget("pickle in a notice", notice)
    answer = frame(FrameKind.RESPONSE, [], value(ref(0), [7, data, []]))
    yield Gadget("pickle in an answer", answer)


ATTRIBUTES = (
    *(
        "__class__",
        "__reduce__",
        "__reduce_ex__",
        "__init__",
        "__globals__",
        "__dict__",
    ),
    *("__getattribute__", "__setattr__", "__call__", "__subclasshook__", "_private"),
    *("computed", "held", "method.__globals__", "missing", "mro"),
    *("__init__.__globals__", "__class__.__base__", "count", "\0", "method "),
)


def by_method() -> Iterator[Gadget]:
    """Take a method of a plain value, or of what is exposed."""
    values: dict[str, tuple[Any, ...]] = {
        "text": ("{0.__class__}",),
        "list": ([1],),
        "dict": ({"a": 1},),
        "number": (1,),
        "bytes": (b"x",),
        "tensor": (ref(0), [0, 0, "float32", [1], 0]),
        "array": (ref(0), [4, "<f4", [1], "C", 0]),
        "function": (ref(0), [8, f"{MODULE}:exposed"]),
        "class": (ref(0), [8, f"{MODULE}:Exposed"]),
        "error": (ref(0), [12, f"{MODULE}:ExposedError", msgpack.packb([[], {}, {}])]),
    }
    more = ("format", "append", "pop", "tofile", "dump", "numpy", "add_note", "method")
    for kind, (tree, *entries) in values.items():
        for name in (*ATTRIBUTES, *more):
            method = [9, msgpack.packb(tree), name]
            message = request(
                [ref(len(entries)), COMMAND],
                *entries,
                method,
                target=None,
                buffers=(bytes(4),) if entries else (),
            )
            yield Gadget(f"{name} of a {kind}", message)


def by_reference(creator: int) -> Iterator[Gadget]:
    """Name a method of an object that an RRef refers to; 1 is exposed, 2 is not."""
    for serial, names in (
        (1, ATTRIBUTES),
        (2, (*ATTRIBUTES, "method")),
        (3, ("method", "__class__", "")),  # there is no such value
    ):
        for name in names:
            target: list[Any] = ["=", creator, serial, name]
            yield Gadget(f"{name} of value {serial}", request([COMMAND], target=target))
    for fields in ([], [1], ["a", "b", "c"], [1, 2, 3], [1, 2, "x", 4]):
        target = ["=", *fields]
        yield Gadget(f"target {target}", request([], target=target))
    yield Gadget("another target", request([], target=["!", creator, 1, "method"]))


def by_error() -> Iterator[Gadget]:
    """Have an exception set what is not its own."""
    name = f"{MODULE}:ExposedError"
    for slots in (
        {"__class__": ref(0)},
        {"__dict__": {"a": 1}},
        {"__traceback__": None},
        {"__init__": ref(0)},
        {"__reduce__": "x"},
    ):
        packed = msgpack.packb([[], {"__class__": "x"}, slots])
        message = request([ref(1)], [8, f"{MODULE}:exposed"], [12, name, packed])
        yield Gadget(f"slots {slots}", message)
    forms: tuple[Any, ...] = (None, [], [1], [1, 2, 3], [[], [], []], [{}, 1, {}])
    for parts in forms:
        packed = msgpack.packb(parts)
        for named in (name, "builtins:ExceptionGroup", "builtins:UnicodeDecodeError"):
            yield Gadget(f"{named} of {parts}", request([ref(0)], [12, named, packed]))


def by_plain_value() -> Iterator[Gadget]:
    """Send names and sizes that a careless constructor would believe."""
    for dtype in (
        *(
            "O",
            "|O",
            "|O8",
            "3i8",
            "f4,f4",
            "(99999999,)i8",
            "i8;import os",
            "V9999999999",
        ),
        *([["a", "|O"]], [["a", "<f4", [1 << 40]]], [[["t", "a"], [["b", "|O"]]]], [1]),
    ):
        yield Gadget(f"array {dtype}", request([ref(0)], [4, dtype, [1], "C", -1]))
        yield Gadget(f"dtype {dtype}", request([ext(17, dtype)]))
        yield Gadget(f"scalar {dtype}", request([ext(16, [dtype, bytes(8)])]))
    for code in (11, 12, 14, 15):
        for text in (
            "__class__",
            "eval",
            "torch.load",
            "cuda:0;x",
            "",
            "x" * 9999,
            [1],
        ):
            yield Gadget(f"torch {code} {text!r:.20}", request([ext(code, text)]))
    for code in (1, 2, 3, 4, 5, 6, 7, 8, 13, 18, 19, 20, 21, 22, 127, -1 & 0x7F):
        for tree in (
            None,
            1 << 62,
            "x",
            [1, 2, 3, 4],
            {"a": 1},
            [[1]],
            b"x" * 2_000_000,
        ):
            yield Gadget(f"ext {code} of {tree!r:.20}", request([ext(code, tree)]))


def by_size() -> Iterator[Gadget]:
    """Ask for memory, or for depth, with few bytes."""
    huge = 1 << 62
    for shape in ([huge], [huge, huge], [-1], [1 << 31] * 64, [1] * 65, [None], "x"):
        for code in ([0, 0, "float32", shape, -1], [0, 32, "float32", shape, -1]):
            yield Gadget(f"tensor {shape!r:.30}", request([ref(0)], code))
        yield Gadget(
            f"array {shape!r:.30}", request([ref(0)], [4, "<f8", shape, "C", -1])
        )
    strided = [0, 0, "float32", [2, 2], 0, huge, [huge, -huge]]
    yield Gadget("strides", request([ref(0)], strided, buffers=(bytes(4),)))
    yield Gadget("shared", request([ref(0)], [14, 0, "float32", [4], 0, 0, [1]],
                                   buffers=(bytes(16),)))  # fmt: skip
    for raw in (
        b"\xdd\xff\xff\xff\xff",  # an array of 2**32 - 1 elements
        b"\xdf\xff\xff\xff\xff",  # a map
        b"\xdb\xff\xff\xff\xff",  # a text
        b"\xc9\xff\xff\xff\xff\x01",  # an ExtType
        b"\x91" * 100_000,  # as many lists in each other
        b"\x81\xa1a" * 100_000,
        b"\xc1",
    ):
        control = struct.pack("<I", 0) + raw
        head = [[0, f"{MODULE}:exposed"], None]
        message = frame(FrameKind.REQUEST, head, control)
        yield Gadget(f"tree {raw[:6]!r}", message)
        control = struct.pack("<I", len(raw)) + raw + b"\xc0"
        yield Gadget(f"table {raw[:6]!r}", frame(FrameKind.REQUEST, head, control))
    nested: Any = None
    for _ in range(100):
        nested = ext(1, [nested])
    yield Gadget("nested", request([nested]))
    yield Gadget("entries", request([], *([5, 0] for _ in range((1 << 18) + 1))))
    yield Gadget("itself", request([ref(0)], [10, msgpack.packb([ref(0), [], {}])]))
    for compressor in ("zstd", "lz4", "eval", ""):
        for nbytes in (1 << 62, -1, 1 << 34):
            packings = msgpack.packb([["", "", nbytes, compressor, [4]]])
            control = struct.pack("<I", len(packings) | 1 << 30) + packings
            control += value([[ref(0)], {}], [5, 0])
            head = [[0, f"{MODULE}:exposed"], None]
            message = frame(FrameKind.REQUEST, head, control, bytes(4))
            yield Gadget(f"codec {compressor} {nbytes}", message)


JUNK: tuple[Any, ...] = (
    *(None, 5, -1, 1 << 63, "x", b"x" * 16, [], {}, [None], [1], [1, 2], [[]]),
    *([1, 2, 3, 4], [1, 2, 3, 4, []], [1, 2, 3, 4, [[1, -1]]], [["x"]], [[1, 2, 3]]),
    *([1, 2, 3, 4, True, [], [[1, 0]], [None]], ["x"] * 9, [{}] * 5, [[[[]]]]),
    *([0, 1 << 62, b"x" * 16], [-1, 1, b""], [b"x" * 16, 1 << 62, b"x" * 16]),
    *([[b"x" * 16, -1]], [1, ref(9)], [1, [1, 2], None, True, True]),
)
METHODS = {
    "rref": ("register", "registered", "gone", "probe", "settled", "release"),
    "autograd": (
        *("advance", "close", "waits", "outcome", "join"),
        *("commit", "abort", "release"),
    ),
    "optim": (
        "create",
        "step",
        "prepare",
        "commit",
        "add_group",
        "state",
        "load_state",
    ),
    "optim ": ("rates", "set_rate", "add_scheduler", "step_scheduler", "drop"),
    "memory": ("attach", "attached", "detach"),
    "regions": ("has", "attach", "attach_part", "gone"),
    "rounds": ("arrivals", "report", "result", "failed", "elsewhere", "left_out"),
    "rendezvous": ("collect", "share"),
    "": ("", "__class__", "on_request", "close", "_handlers"),
}


def by_service() -> Iterator[Gadget]:
    """Send junk to each part of the worker itself."""
    for service, methods in METHODS.items():
        for method in (*methods, "__init__", "answer"):
            for index, junk in enumerate(JUNK):
                head = [service.strip(), method]
                message = frame(FrameKind.SERVICE, head, value(junk))
                yield Gadget(f"{service}.{method} {junk!r:.40}", message)
                if index % 4 == 0:  # most of these cost a connection
                    message = frame(FrameKind.NOTICE, head, value(junk))
                    yield Gadget(f"notice {service}.{method} {junk!r:.40}", message)


def by_optimizer() -> Iterator[Gadget]:
    """Have an optimizer made of a class that is none."""
    for name in (*NAMES[:40], f"{MODULE}:exposed", "builtins:list", "builtins:bytes"):
        for method in ("create", "add_scheduler"):
            control = value([1, ref(0), [{"params": []}], [COMMAND], {}], [8, name])
            message = frame(FrameKind.SERVICE, ["optim", method], control)
            yield Gadget(f"optim {method} {name}", message)


def by_meta() -> Iterator[Gadget]:
    """Send junk beside a request that is sound."""
    for key in ("a", "r", "l", "c", "o", "?"):
        for junk in (*JUNK, [1 << 62, 1, 1], "zstd", "x" * 999):
            if "ExtType" not in repr(junk):
                yield Gadget(f"meta {key} {junk!r:.40}", request([], meta={key: junk}))
    for meta in (5, "x", [1], {1: 2}, {"r": [7, 7], "a": [1, 2, 3], "c": "zstd"}):
        yield Gadget(f"meta {meta!r}", request([], meta=meta))
    heads: tuple[Any, ...] = ([], [None], [[]], [[0]], [[0, 1]], [["x"]], [1.5, None])
    for head in (*heads, [{}, {}], {}):
        yield Gadget(f"head {head!r}", frame(FrameKind.REQUEST, head, value([[], {}])))


def gadgets(creator: int) -> Iterator[Gadget]:
    """Give all of them; values 1 and 2 of `creator` are as `by_reference` says."""
    yield from by_name()
    yield from by_pickle()
    yield from by_method()
    yield from by_reference(creator)
    yield from by_error()
    yield from by_plain_value()
    yield from by_size()
    yield from by_service()
    yield from by_optimizer()
    yield from by_meta()
