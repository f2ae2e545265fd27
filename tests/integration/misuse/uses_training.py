"""How autograd, optimizers, modules, collectives and data parallelism are used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tests.integration.misuse.using import Use

USES: Final[Mapping[str, Use]] = {}
