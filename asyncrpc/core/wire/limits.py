"""Limits of the memory that one message may make its receiver allocate.

The reader checks them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from asyncrpc.core.arguments import check_count


@dataclass(frozen=True, slots=True)
class MessageLimits:
    """Limits of the memory that a peer may make this worker allocate.

    Attributes:
        control_bytes_max: bytes of one control part; it holds structure, not tensors.
        payload_bytes_max: bytes of all buffers of one message.
        buffers_max: number of buffers of one message.
        transfers_max: number of deferred payloads on their way at the same time.
        unpacked_bytes_max: bytes of a payload that was sent with a codec, unpacked.
        elements_max: values in one control part; a container counts for 9.
    """

    control_bytes_max: int = 64 << 20
    payload_bytes_max: int = 1 << 40
    buffers_max: int = 1 << 17
    transfers_max: int = 4096
    unpacked_bytes_max: int = 16 << 30
    elements_max: int = 1 << 21

    def __post_init__(self) -> None:
        """Validate the fields.

        Raises:
            UsageError: a field is not an integer above 0; the message names the field.
        """
        for field in fields(self):
            value = getattr(self, field.name)
            check_count(f"MessageLimits.{field.name}", value, at_least=1)
