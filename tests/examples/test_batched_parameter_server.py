"""One update answers all trainers, and teaches the model as well."""

from __future__ import annotations

import pytest

from tests.examples.programs import rows, run


@pytest.mark.slow
@pytest.mark.timeout(70)
def test_a_batched_server_updates_once_for_all_trainers() -> None:
    alone, batched = rows(
        run(
            "batched_parameter_server.py", "--quick", "--trainers", "3", "--steps", "50"
        )
    )
    assert alone[:3] == ["one by one", "150", "150"]
    assert batched[:3] == ["batched", "150", "50"]
    for row in (alone, batched):
        # In which order the trainers come is up to them: 89.4 % was seen.
        assert float(row[5].rstrip("%")) >= 85.0
