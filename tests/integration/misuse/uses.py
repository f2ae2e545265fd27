"""How every public function is used, by its name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tests.integration.misuse import (
    uses_calls,
    uses_ddp,
    uses_extend,
    uses_hosts,
    uses_training,
)
from tests.integration.misuse.using import Use

USES: Final[Mapping[str, Use]] = {
    **uses_calls.USES,
    **uses_training.USES,
    **uses_ddp.USES,
    **uses_hosts.USES,
    **uses_extend.USES,
}
