"""The messages about memory; docs/reference/wire-protocol.md has them all."""

from __future__ import annotations

from typing import Annotated, Any, Final, NamedTuple, TypeAlias

from asyncrpc.runtime.messages import Notice, Request, message
from asyncrpc.runtime.schema import Leaf, Positive, integer
from asyncrpc.serde.shared import KEY_BYTES
from asyncrpc.shm.machine.pool import SLABS_MAX

MEMORY: Final = "memory"
REGIONS: Final = "regions"

SlabNumber: TypeAlias = Annotated[
    int, integer(0, SLABS_MAX, f"the number of a slab, below {SLABS_MAX}")
]
Key: TypeAlias = Annotated[
    bytes,
    Leaf(
        f"(type({{v}}) is bytes and len({{v}}) == {KEY_BYTES})",
        f"a key of {KEY_BYTES} bytes",
        "key",
    ),
]


@message(MEMORY, "attach")
class AttachSlab(Notice):
    """Map a slab of the sender.

    Attributes:
        slab: its number.
        size_bytes: of the slab.
        token: names its descriptor, which has been passed by another socket.
    """

    slab: SlabNumber
    size_bytes: Positive
    token: bytes


@message(MEMORY, "attached")
class SlabAttached(Notice):
    """A slab has been mapped, or why it has not.

    Attributes:
        slab: its number.
        refusal: why not; empty if it has.
    """

    slab: SlabNumber
    refusal: str


@message(MEMORY, "detach")
class DetachSlabs(Notice):
    """Unmap slabs in which the receiver holds nothing."""

    slabs: list[SlabNumber]


class KeyedRegion(NamedTuple):
    """A region, and its size."""

    key: Key
    size_bytes: Positive


@message(REGIONS, "has")
class HasRegions(Request[list[bool]]):
    """Ask for each of these regions whether the receiver has it."""

    regions: list[KeyedRegion]


@message(REGIONS, "attach")
class AttachRegion(Request[None]):
    """Map a region, whose descriptor has been passed as a slab's."""

    key: Key
    size_bytes: Positive
    token: bytes


@message(REGIONS, "open")
class OpenRegion(Request[None]):
    """Open memory of a device.

    Attributes:
        key: of the region.
        size_bytes: of the region.
        token: names the writing end of a pipe, which the receiver closes when it uses
            the memory no more.
        device: such as `cuda:0`.
        handle: what the device opens it by.
    """

    key: Key
    size_bytes: Positive
    token: bytes
    device: str
    handle: list[Any]


@message(REGIONS, "gone")
class RegionsGone(Request[None]):
    """The sender has these regions no more, unless they are passed again."""

    keys: list[Key]
