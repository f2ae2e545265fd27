"""A codec at each end of a wire that only copies bytes, as a connection does."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from asyncrpc.core.serde import Codec, Encoded, FunctionTable, Limits, Policy


def named(value: object) -> str:
    """Return what a test of a value is called: the same in every process."""
    return re.sub(" at 0x[0-9a-f]+", "", repr(value))


TRUSTED = Codec(FunctionTable(Policy.TRUSTED))
STRICT = Codec(FunctionTable(Policy.STRICT))


def strict(*allow: str, limits: Limits = Limits()) -> Codec:  # noqa: B008 - frozen
    return Codec(FunctionTable(Policy.STRICT, allow), None, limits)


def received(encoded: Encoded) -> list[memoryview]:
    """Return the buffers as they arrive: in memory of their own, writable."""
    return [np.frombuffer(view, np.uint8).copy().data for view in encoded.buffers]


def round_trip(
    value: Any,
    codec: Codec = TRUSTED,
    on_gradient: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Any:
    encoded = codec.encode(value)
    return codec.decode(encoded.control, received(encoded), on_gradient=on_gradient)


def sent_bytes(encoded: Encoded) -> int:
    return sum(view.nbytes for view in encoded.buffers)
