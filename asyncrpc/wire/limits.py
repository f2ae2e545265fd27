"""What one message may make its receiver allocate: said here, checked by the reader."""

from __future__ import annotations

from dataclasses import dataclass, fields

from asyncrpc.arguments import check_count


@dataclass(frozen=True, slots=True)
class MessageLimits:
    """What a peer may ask us to allocate.

    Attributes:
        control_bytes_max: of one control part; it holds structure, not tensors.
        payload_bytes_max: of all buffers of one message.
        buffers_max: of one message.
        transfers_max: deferred payloads on their way at the same time.
        unpacked_bytes_max: what a payload sent with a codec may become.
    """

    control_bytes_max: int = 64 << 20
    payload_bytes_max: int = 1 << 40
    buffers_max: int = 1 << 20
    transfers_max: int = 4096
    unpacked_bytes_max: int = 16 << 30

    def __post_init__(self) -> None:
        """Refuse what could never work.

        Raises:
            UsageError: a number is no integer, or not above 0; the message names it.
        """
        for one in fields(self):
            value = getattr(self, one.name)
            check_count(f"MessageLimits.{one.name}", value, at_least=1)
