"""Control messages: typed records to and from msgpack.

A record is an array, its fields in order.  Evolution: fields are added at the end and
have a default; a reader ignores fields that it does not know.  No field is removed or
given another meaning without a new protocol version.

`head` of each kind of frame:

    REQUEST     [target, meta]   the function, and data that accompanies the values
    RESPONSE    [meta] or empty
    ERROR       [meta] or empty
    STREAM_ITEM [serial]
    SERVICE     [service, method]
    NOTICE      [service, method]

`target` is an int for a function whose name this connection has sent before, `[id,
name]` to send a name, `["=", ...]` for a target that an extension resolves (such as a
method of a remote reference), and nil when the callable is the first value of the
control part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, fields
from typing import Any, Final, TypeAlias

import msgpack

from asyncrpc.core.ids import NAME_CHARACTERS_MAX, is_name
from asyncrpc.core.wire.frames import HEAD_BYTES_MAX
from asyncrpc.errors import (
    FrameTooLargeError,
    LocalProtocolError,
    MalformedError,
)

RANK_END: Final = 1 << 31
PID_END: Final = 1 << 32
HOST_ID_CHARACTERS_MAX: Final = 255
ADDRESSES_CHARACTERS_MAX: Final = 8_192  # of all addresses of a worker

Target: TypeAlias = "int | list[Any] | None"
Meta: TypeAlias = Mapping[str, Any]

# msgpack's packer is reused: making one costs more than packing a head.
_PACKER: Final = msgpack.Packer(autoreset=True)


@dataclass(frozen=True, slots=True)
class Hello:
    """The identity of one end of a connection; the first frame of each side.

    Attributes:
        name: the name of the worker.
        incarnation: the incarnation of the worker.
        rank: the rank of the worker; -1 if it has no rank.
        pid: the id of its process, for error texts.
        expects: the name of the worker that the dialer wants; empty in an answer.
        attempt: how many connections the dialer has tried before this one.
        verdict: empty if the acceptor accepts the connection, else the reason.
        addresses: addresses at which the worker can be reached.
        host_id: identifies the host and the network namespace of the worker.
        strict: whether the worker refuses pickles.
        lane: from the dialer: 0, or the token of the connection that this is a lane of.
        resume: from the dialer: 0, or the token of the connection that this connection
            resumes; see `wire.resume`.
        received: with `resume`, and in the answer to it: how many bytes of the resumed
            connection this side has read.
        sidecar: where peers can ask whether the worker's process runs; may be empty.
        token: from a relay that dials for another: the token of the connection that is
            passed on; else 0.
        observes: from the dialer: whether it only looks, as a command of `asyncrpc`
            does, and is not a member.
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
    sidecar: tuple[str, ...] = ()
    token: int = 0
    observes: bool = False

    def is_of(self, other: Hello) -> bool:
        """Return whether the same life of the same worker introduces itself.

        Its number alone does not tell: every worker knows it.
        """
        return (self.name, self.incarnation) == (other.name, other.incarnation)

    def encode(self) -> bytes:
        """Return the control part of a HELLO frame."""
        return pack_head(list(astuple(self)))

    @classmethod
    def decode(cls, control: bytes) -> Hello:
        """Read what `encode` wrote."""
        if len(control) > HEAD_BYTES_MAX:
            raise FrameTooLargeError(
                f"a HELLO has {len(control)} bytes; the limit is {HEAD_BYTES_MAX}"
            )
        record = unpack_head(control)
        if len(record) < _HELLO_REQUIRED or any(
            type(value) is not kind
            for value, kind in zip(record, _HELLO_TYPES, strict=False)
        ):
            raise MalformedError("a HELLO has the wrong fields")
        names = [field.name for field in fields(cls)]
        values = dict(zip(names, record, strict=False))
        for name in ("addresses", "sidecar"):
            addresses = values.get(name, [])
            if any(type(address) is not str for address in addresses):
                raise MalformedError("a HELLO has an address that is not a string")
            values[name] = tuple(addresses)
        hello = cls(**values)
        if problem := hello._problem():
            raise MalformedError(f"a HELLO has {problem}")
        return hello

    def _problem(self) -> str:
        """Return which field no worker can have so; empty if there is none."""
        if not is_name(self.name):
            return f"no name of 1 to {NAME_CHARACTERS_MAX} printable characters"
        if not -1 <= self.rank < RANK_END:
            return f"the rank {self.rank}"
        if not 0 <= self.pid < PID_END:
            return f"the process id {self.pid}"
        if not self.incarnation > 0 or len(self.host_id) > HOST_ID_CHARACTERS_MAX:
            return "no identity of a worker"
        for addresses in (self.addresses, self.sidecar):
            if sum(map(len, addresses)) > ADDRESSES_CHARACTERS_MAX:
                return f"addresses of more than {ADDRESSES_CHARACTERS_MAX} characters"
        return ""


_HELLO_TYPES: Final = (
    *(str, int, int, int, str, int, str, list, str, bool, int),
    *(int, int, list, int, bool),
)
_HELLO_REQUIRED: Final = 4  # the fields without a default


def pack_head(record: list[Any]) -> bytes:
    """Return the bytes of a head."""
    packed: bytes = _PACKER.pack(record)
    if len(packed) > HEAD_BYTES_MAX:
        raise LocalProtocolError(
            f"a head has {len(packed)} bytes; the limit is {HEAD_BYTES_MAX}"
        )
    return packed


def unpack_head(head: bytes) -> list[Any]:
    """Read what `pack_head` wrote; always an array."""
    try:
        record = msgpack.unpackb(head, strict_map_key=True)
    except (ValueError, msgpack.UnpackException) as error:
        raise MalformedError(f"a head is not msgpack: {error}") from error
    if type(record) is not list:
        raise MalformedError("a head is not an array")
    return record
