"""Errors on their way to a caller: whatever happens, there is something to send.

An error is described in full; what cannot travel of it is left out.  If even that
fails, a few words are sent, and if there is no memory for these, a record that has been
ready since the worker was started.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from asyncrpc.core.serde import Codec, Encoded, describe_exception, undescribed
from asyncrpc.core.serde.exceptions import without_code

logger = logging.getLogger("asyncrpc")


class ErrorEncoder:
    """Encodes the errors of one worker."""

    __slots__ = ("_codec", "_last_words", "_pid", "_worker")

    def __init__(self, codec: Codec, *, worker: str, pid: int) -> None:
        self._codec = codec
        self._worker = worker
        self._pid = pid
        self._last_words = self._in_few_words("MemoryError", MemoryError())

    def describe(self, error: BaseException) -> dict[str, Any]:
        """Return an error as it travels: what can travel of it; in any thread."""
        name, pid = self._worker, self._pid
        try:
            return describe_exception(error, self._codec, worker=name, pid=pid)
        except BaseException as problem:  # noqa: BLE001  (the error's own code)
            raised = type(error).__name__
            return undescribed(raised, problem, worker=name, pid=pid)

    def in_words(self, error: BaseException) -> bytes:
        """Return the control part of an error that holds no tensor."""
        return self._codec.encode(without_code(self.describe(error))).control

    def encode(
        self,
        describe: Callable[[], Any],
        prepare: Callable[[Encoded], None],
        *,
        takes_code: bool,
    ) -> Encoded:
        """Return the message for an error; never raises."""
        raised = ""
        try:
            tree = describe() if takes_code else without_code(describe())
            raised = str(tree["type"]).rpartition(":")[2]
            encoded = self._codec.encode(tree)
            if encoded.copies or encoded.code:
                prepare(encoded)
        except BaseException as problem:
            logger.exception("worker %r: an error could not be sent", self._worker)
            return self._shortened(raised, problem)
        return encoded

    def _shortened(self, raised: str, problem: BaseException) -> Encoded:
        try:
            return self._in_few_words(raised, problem)
        except BaseException:  # noqa: BLE001  (no memory: what is ready needs none)
            return self._last_words

    def _in_few_words(self, raised: str, problem: BaseException) -> Encoded:
        worker, pid = self._worker, self._pid
        return self._codec.encode(undescribed(raised, problem, worker=worker, pid=pid))


def holds_device_tensor(error: BaseException) -> bool:
    """Return whether the text of an error may show a tensor on a device."""
    # Read past the error's class, which may redefine `args`.
    args = vars(BaseException)["args"].__get__(error)
    tensors = [
        argument for argument in args if issubclass(type(argument), torch.Tensor)
    ]
    return not all(tensor.is_cpu for tensor in tensors)
