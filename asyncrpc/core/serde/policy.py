"""What a worker accepts from its peers: the policy, and the limits."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Policy(enum.Enum):
    """Whether a peer may send values that run code while they are decoded."""

    TRUSTED = "trusted"  # pickle both ways, imports by name: authenticated peers only
    STRICT = "strict"  # neither; only functions that are exposed or allowed


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on one message.  The sender checks them too, so that it gets the error.

    Attributes:
        depth_max: levels of containers inside each other.  A level of tuples costs a C
            stack frame of 40 KiB in the decoder: 64 of them fit any thread.
        control_bytes_max: bytes of everything but buffers.  Long strings and lists are
            legitimate; more data is cheaper as a tensor.
        elements_max: values in one message, while it is read: a number or a text is
            one, a container 8 more, so that 262,144 fit; all take 128 MiB at most.
        objects_max: tensors, arrays, pickles, functions and references in one message.
            A module of 100 000 parameters fits.
        dimensions_max: of a tensor; numpy, whose memory we receive into, stops at 64.
        unpacked_bytes_max: bytes that the payload of a message with a codec may become:
            a MiB of compressed zeros from a peer can take more than a GiB here.
    """

    depth_max: int = 64
    control_bytes_max: int = 64 << 20
    elements_max: int = 1 << 21
    objects_max: int = 1 << 17
    dimensions_max: int = 64
    unpacked_bytes_max: int = 16 << 30
