"""The messages about memory; docs/reference/wire-protocol.md has them all."""

from __future__ import annotations

from typing import Annotated, Any, Final, NamedTuple, TypeAlias

from asyncrpc.core.serde.shared import KEY_BYTES
from asyncrpc.core.services.schema import (
    Integer,
    Notice,
    Passing,
    Positive,
    Request,
    message,
)
from asyncrpc.core.shm.machine.pool import SLABS_MAX

MEMORY: Final = "memory"
REGIONS: Final = "regions"

SlabNumber: TypeAlias = Annotated[
    int, Integer(0, SLABS_MAX, f"the number of a slab, below {SLABS_MAX}")
]
Key: TypeAlias = Annotated[
    bytes,
    Passing(
        lambda value: type(value) is bytes and len(value) == KEY_BYTES,
        f"a key of {KEY_BYTES} bytes",
        "key",
    ),
]


@message(MEMORY, "attach", about="a slab of the sender")
class AttachSlab(Notice):
    """Map a slab of the sender.

    Attributes:
        slab: the number of the slab.
        size_bytes: the size of the slab.
        token: names the slab's descriptor, which was passed by another socket.
    """

    slab: SlabNumber
    size_bytes: Positive
    token: bytes


@message(MEMORY, "attached", about="a slab that the receiver has passed to the sender")
class SlabAttached(Notice):
    """The sender has mapped a slab, or refused to.

    Attributes:
        slab: the number of the slab.
        refusal: the reason of the refusal; empty if the slab has been mapped.
    """

    slab: SlabNumber
    refusal: str


@message(MEMORY, "detach", about="slabs of the sender")
class DetachSlabs(Notice):
    """Unmap slabs in which the receiver holds nothing."""

    slabs: list[SlabNumber]


class KeyedRegion(NamedTuple):
    """A region, and its size."""

    key: Key
    size_bytes: Positive


@message(REGIONS, "has", about="memory whose key the sender was sent, or has made")
class HasRegions(Request[list[bool]]):
    """Ask for each region whether the receiver has it."""

    regions: list[KeyedRegion]


@message(REGIONS, "attach", about="memory whose descriptor the sender has passed")
class AttachRegion(Request[None]):
    """Map a region, whose descriptor was passed like that of a slab."""

    key: Key
    size_bytes: Positive
    token: bytes


@message(REGIONS, "attach_part", about="memory whose descriptor the sender has passed")
class AttachPart(Request[None]):
    """Map a region that is a part of a file, passed like that of a slab.

    Attributes:
        key: the key of the region.
        size_bytes: the size of the region.
        token: names the descriptor of the file.
        start: where the region begins in the file, in bytes; a multiple of a page.
    """

    key: Key
    size_bytes: Positive
    token: bytes
    start: Positive


@message(REGIONS, "open", about="memory of a device that the sender lends")
class OpenRegion(Request[None]):
    """Open memory of a device.

    Attributes:
        key: the key of the region.
        size_bytes: the size of the region.
        token: names the writing end of a pipe, which the receiver closes when it no
            longer uses the memory.
        device: the device, such as `cuda:0`.
        handle: the handle by which the device opens the memory.
    """

    key: Key
    size_bytes: Positive
    token: bytes
    device: str
    handle: list[Any]


@message(REGIONS, "gone", about="the sender, which no longer has the memory")
class RegionsGone(Request[None]):
    """The sender no longer has these regions, unless they are passed again."""

    keys: list[Key]
