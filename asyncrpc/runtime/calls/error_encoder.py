"""Errors on their way to a caller: whatever happens, there is something to send.

An error is described in full; what cannot travel of it is left out.  If even that
fails, a few words are sent, and if there is no memory for these, a record that has been
ready since the connection was opened.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from asyncrpc.serde import Codec, Encoded, describe_exception, undescribed

logger = logging.getLogger("asyncrpc")


class ErrorEncoder:
    """Encodes the errors of one worker."""

    __slots__ = ("_codec", "_last_words", "_pid", "_worker")

    def __init__(self, codec: Codec, *, worker: str, pid: int) -> None:
        self._codec = codec
        self._worker = worker
        self._pid = pid
        self._last_words = self._in_few_words(MemoryError())

    def describe(self, error: BaseException) -> dict[str, Any]:
        """Return an error as it travels; in any thread."""
        return describe_exception(
            error, self._codec, worker=self._worker, pid=self._pid
        )

    def encode(
        self, describe: Callable[[], Any], fetch: Callable[[Encoded], None]
    ) -> Encoded:
        """Return the message for an error; never raises.

        Args:
            describe: returns the error as `describe` above does.
            fetch: has what is on devices copied into the message.
        """
        try:
            encoded = self._codec.encode(describe())
            if encoded.copies:
                fetch(encoded)
        except BaseException as error:
            logger.exception("worker %r: an error could not be sent", self._worker)
            return self._shortened(error)
        return encoded

    def _shortened(self, error: BaseException) -> Encoded:
        try:
            return self._in_few_words(error)
        except BaseException:  # noqa: BLE001  (no memory: what is ready needs none)
            return self._last_words

    def _in_few_words(self, error: BaseException) -> Encoded:
        return self._codec.encode(
            undescribed(error, worker=self._worker, pid=self._pid)
        )


def holds_device_tensor(error: BaseException) -> bool:
    """Say whether the text of an error may show what is on a device."""
    return any(isinstance(one, torch.Tensor) and not one.is_cpu for one in error.args)
