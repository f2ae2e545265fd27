"""Control messages: typed records to and from msgpack.

A record is an array, its fields in order.  Evolution: fields are added at the end and
have a default; a reader ignores those it does not know.  Nothing is ever removed or
given another meaning without a new protocol version.

`head` of each kind of frame:

    REQUEST     [target, meta]   what to run, and what travels beside it
    RESPONSE    [meta] or empty
    ERROR       [meta] or empty
    STREAM_ITEM [serial]
    SERVICE     [service, method]
    NOTICE      [service, method]

`target` is an int for a function whose name this connection has sent before, `[id,
name]` to send one, `["=", ...]` for what an extension resolves (a method of a remote
reference, say), and nil when the callable is the first value of the control part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, fields
from typing import Any, Final, TypeAlias

import msgpack

from asyncrpc.errors import (
    FrameTooLargeError,
    LocalProtocolError,
    MalformedError,
)
from asyncrpc.wire.frames import HEAD_BYTES_MAX

Target: TypeAlias = "int | list[Any] | None"
Meta: TypeAlias = Mapping[str, Any]

# msgpack's packer is reused: making one costs more than packing a head.
_PACKER: Final = msgpack.Packer(autoreset=True)


@dataclass(frozen=True, slots=True)
class Hello:
    """The identity of one end of a connection; the first frame of each side.

    Attributes:
        name: of the worker.
        incarnation: of the worker.
        rank: of the worker; -1 if it has none.
        pid: of its process, for error texts.
        expects: name of the worker that the dialer wanted; empty in an answer.
        attempt: how many connections the dialer has tried before this one.
        verdict: of the acceptor: empty if it takes the connection, else why not.
        addresses: where the worker can be reached.
        host_id: which host and network namespace it is in.
        strict: whether it refuses pickles.
        lane: of the dialer: 0, or the token of the connection that this is a lane of.
        resume: of the dialer: 0, or the token of the connection whose place this one
            takes; see `wire.resume`.
        received: with `resume`, and in the answer to it: how many bytes of the other
            connection this side has read.
        watch: where it can be asked whether the worker's process runs, if anywhere.
    """

    name: str
    incarnation: int
    rank: int
    pid: int
    expects: str = ""
    attempt: int = 0
    verdict: str = ""
    addresses: tuple[str, ...] = ()
    host_id: str = ""
    strict: bool = False
    lane: int = 0
    resume: int = 0
    received: int = 0
    watch: tuple[str, ...] = ()

    def encode(self) -> bytes:
        """Return the control part of a HELLO frame.

        Raises:
            LocalProtocolError: it is longer than a head may be.
        """
        return pack_head(list(astuple(self)))

    @classmethod
    def decode(cls, control: bytes) -> Hello:
        """Read what `encode` wrote.

        Raises:
            MalformedError: it is no HELLO.
            FrameTooLargeError: it is longer than a head may be.
        """
        if len(control) > HEAD_BYTES_MAX:
            raise FrameTooLargeError(
                f"a HELLO of {len(control)} bytes; the limit is {HEAD_BYTES_MAX}"
            )
        record = unpack_head(control)
        if len(record) < _HELLO_REQUIRED or any(
            type(value) is not kind
            for value, kind in zip(record, _HELLO_TYPES, strict=False)
        ):
            raise MalformedError("a HELLO has the wrong fields")
        names = [field.name for field in fields(cls)]
        values = dict(zip(names, record, strict=False))
        for name in ("addresses", "watch"):
            addresses = values.get(name, [])
            if any(type(address) is not str for address in addresses):
                raise MalformedError("a HELLO has an address that is not a string")
            values[name] = tuple(addresses)
        return cls(**values)


_HELLO_TYPES: Final = (
    *(str, int, int, int, str, int, str, list, str, bool, int),
    *(int, int, list),
)
_HELLO_REQUIRED: Final = 4  # the fields without a default


def pack_head(record: list[Any]) -> bytes:
    """Return the bytes of a head.

    Raises:
        LocalProtocolError: the head is too long.
    """
    packed: bytes = _PACKER.pack(record)
    if len(packed) > HEAD_BYTES_MAX:
        raise LocalProtocolError(
            f"a head of {len(packed)} bytes; the limit is {HEAD_BYTES_MAX}"
        )
    return packed


def unpack_head(head: bytes) -> list[Any]:
    """Read what `pack_head` wrote; always an array.

    Raises:
        MalformedError: it is no msgpack array.
    """
    try:
        record = msgpack.unpackb(head, strict_map_key=True)
    except (ValueError, msgpack.UnpackException) as error:
        raise MalformedError(f"a head is not msgpack: {error}") from error
    if type(record) is not list:
        raise MalformedError("a head is not an array")
    return record
