"""What `make fuzz` looks for in millions of inputs, in some hundreds of Hypothesis.

The invariants are those of `tests/fuzz`; these inputs need no corpus and no coverage.
"""

from __future__ import annotations

import importlib
from contextlib import nullcontext

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.replaying import TARGETS


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of layouts in beta
@pytest.mark.parametrize("name", TARGETS)
@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(first=st.integers(0, 1), rest=st.binary(max_size=300))
def test_random_bytes_never_break_a_decoder(name: str, first: int, rest: bytes) -> None:
    """The first byte chooses between bytes as they are and choices made of them."""
    target = importlib.import_module(f"tests.fuzz.fuzz_{name}")
    with getattr(target, "setting", nullcontext)():
        target.check(bytes([first]) + rest)
