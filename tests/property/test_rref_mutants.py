"""The property test can fail: it finds errors put into the machines on purpose.

The quick ones run here; `python -m tests.property.mutants_rref` runs all of them.
"""

from __future__ import annotations

import pytest

from tests.property.mutants_rref import MUTANTS, Mutant, killer, tables_of

QUICK = ("no-pin", "release-one", "register-not-counted")


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_fits_the_source(mutant: Mutant) -> None:
    assert tables_of(mutant)


@pytest.mark.parametrize("name", QUICK)
def test_property_test_kills_the_mutant(name: str) -> None:
    (mutant,) = [mutant for mutant in MUTANTS if mutant.name == name]
    assert killer(mutant, examples_max=300) is not None
