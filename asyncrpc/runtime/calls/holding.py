"""Messages held back until the peer has what they refer to."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class HeldBack(list[memoryview]):
    """The buffers of a message that must not be sent yet.

    `Connection.send` takes it for a list of buffers that says when.

    Attributes:
        key: kind and call of the message, once it has been given to a connection.
        is_released: whether it may be sent.
    """

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        super().__init__(buffers)
        self.key = (0, 0)
        self.is_released = False
        self._send: Callable[[], None] | None = None
        self._on_sent: Callable[[], None] | None = None

    def hold(
        self,
        key: tuple[int, int],
        send: Callable[[], None],
        on_sent: Callable[[], None] | None,
    ) -> None:
        """Keep a message.

        Args:
            key: its kind and call.
            send: sends it.
            on_sent: called if it is given up.
        """
        self.key, self._send, self._on_sent = key, send, on_sent

    def release(self) -> None:
        """Send it, unless it has been given up."""
        self.is_released = True
        send, self._send = self._send, None
        if send is not None:
            send()

    def give_up(self) -> bool:
        """Do not send it; say whether it would have been."""
        was_held, self._send = self._send is not None, None
        if was_held and self._on_sent is not None:
            self._on_sent()
        return was_held
