"""Values as bytes and tensors, for programs that pickle as RPC does.

Source: torch.distributed.rpc.internal.
"""

from __future__ import annotations

import enum
from typing import Any

import torch

from asyncrpc.compat.rpc import errors
from asyncrpc.compat.rpc.rref import RRef
from asyncrpc.errors import AsyncRpcError
from asyncrpc.serde import Codec, FunctionTable, Policy


class RPCExecMode(enum.Enum):
    """How a call is made, as shown in the name of its profiler range."""

    SYNC = "sync"
    ASYNC = "async"
    ASYNC_JIT = "async_jit"
    REMOTE = "remote"


class _InternalRPCPickler:
    """Turns a value into bytes and tensors; only calls can send references."""

    def __init__(self) -> None:
        self._codec = Codec(FunctionTable(Policy.TRUSTED))

    def serialize(self, obj: Any) -> tuple[bytes, list[torch.Tensor]]:
        """Return a value as bytes, and the tensors beside them.

        Raises:
            RuntimeError: the value is a reference, or cannot be sent.
        """
        if isinstance(obj, RRef):
            obj._serialize()  # noqa: SLF001  (which raises)
        try:
            encoded = self._codec.encode(obj)
        except AsyncRpcError as error:
            failed = errors.of_call(error, lambda _name: -1)
        else:
            tensors = [
                torch.frombuffer(bytearray(view), dtype=torch.uint8)
                for view in encoded.buffers
            ]
            return encoded.control, tensors
        return errors.raised(failed)  # type: ignore[no-any-return]

    def deserialize(self, binary_data: bytes, tensor_table: list[torch.Tensor]) -> Any:
        """Return the value that `serialize` was given.

        Raises:
            RuntimeError: the value cannot be rebuilt.
        """
        views = [memoryview(bytearray(one.numpy())) for one in tensor_table]
        try:
            return self._codec.decode(binary_data, views)
        except AsyncRpcError as error:
            raise RuntimeError(str(error)) from error


_internal_rpc_pickler = _InternalRPCPickler()


def serialize(obj: Any) -> tuple[bytes, list[torch.Tensor]]:
    """Return a value as bytes, and the tensors beside them."""
    return _internal_rpc_pickler.serialize(obj)


def deserialize(binary_data: bytes, tensor_table: list[torch.Tensor]) -> Any:
    """Return the value that `serialize` was given."""
    return _internal_rpc_pickler.deserialize(binary_data, tensor_table)
