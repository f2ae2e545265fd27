"""There is something to send of every error, whatever memory there is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from asyncrpc.core.calls.error_encoder import ErrorEncoder
from asyncrpc.core.serde import Codec, Encoded, FunctionTable, Policy, rebuild_exception
from asyncrpc.errors import RemoteError


class Starved(Codec):
    """A codec that has memory for so many more messages."""

    left = 1

    def encode(
        self, value: Any, *, labels: Sequence[str] = (), pickles: bool = True
    ) -> Encoded:
        self.left -= 1
        if self.left < 0:
            raise MemoryError
        return super().encode(value, labels=labels, pickles=pickles)


def fetch(_encoded: Encoded) -> None:
    pytest.fail("nothing here is on a device")


@pytest.mark.parametrize(
    ("left", "text"),
    [(2, "what was raised"), (1, "cannot be sent"), (0, "cannot be sent: MemoryError")],
)
def test_error_is_encoded_without_memory(left: int, text: str) -> None:
    """In full; in few words where the full ones fail; then what has been ready."""
    functions = FunctionTable(Policy.TRUSTED)
    codec = Starved(functions)
    errors = ErrorEncoder(codec, worker="b", pid=1)

    def describe() -> Any:
        if left < 2:  # the description itself takes what is left
            raise MemoryError
        return errors.describe(ValueError("what was raised"))

    codec.left = left
    encoded = errors.encode(describe, fetch)
    tree = Codec(functions).decode(encoded.control, encoded.buffers)
    error = rebuild_exception(tree, functions, function="f", to="b")
    assert isinstance(error, RemoteError)
    assert text in str(error)
    assert error.worker == "b"
