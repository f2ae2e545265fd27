"""What is public by its name, and is not for users to call: with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tests.integration.misuse import left_out_calls, left_out_hosts, uses_extend
from tests.integration.misuse.left_out_training import LEFT_OUT_TRAINING

LEFT_OUT: Final[Mapping[str, str]] = {
    **left_out_calls.LEFT_OUT,
    **LEFT_OUT_TRAINING,
    **left_out_hosts.LEFT_OUT,
    **uses_extend.LEFT_OUT,
}
