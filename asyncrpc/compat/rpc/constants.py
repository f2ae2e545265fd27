"""Defaults that programs read, the same as torch's."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from torch.distributed.rpc.constants import DEFAULT_INIT_METHOD as _INIT_METHOD
from torch.distributed.rpc.constants import (
    DEFAULT_NUM_WORKER_THREADS as _NUM_WORKER_THREADS,
)
from torch.distributed.rpc.constants import (
    DEFAULT_PROCESS_GROUP_TIMEOUT as _PROCESS_GROUP_TIMEOUT,
)
from torch.distributed.rpc.constants import DEFAULT_RPC_TIMEOUT_SEC as _TIMEOUT_S
from torch.distributed.rpc.constants import UNSET_RPC_TIMEOUT as _UNSET

DEFAULT_RPC_TIMEOUT_SEC: float = _TIMEOUT_S
DEFAULT_INIT_METHOD: str = _INIT_METHOD
DEFAULT_NUM_WORKER_THREADS: int = _NUM_WORKER_THREADS
DEFAULT_SHUTDOWN_TIMEOUT: float = 0  # no limit
DEFAULT_PROCESS_GROUP_TIMEOUT: timedelta = _PROCESS_GROUP_TIMEOUT
# The timeout of a call without one: that of the options applies.
UNSET_RPC_TIMEOUT: Final[float] = _UNSET
