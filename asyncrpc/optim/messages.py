"""The schema of messages to the owners of a distributed optimizer's parameters.

Each begins with the number that the optimizer has at its maker.
"""

from __future__ import annotations

from typing import Any, Final

from asyncrpc.runtime.forms import (
    COUNT,
    FLAG,
    ID,
    LIST,
    MAP,
    REAL,
    TENSOR,
    Form,
    anything,
    array,
    each,
    maybe,
    unfit,
)


def exactly(**fields: Form) -> Form:
    """Return the form of an array that has these fields and no more."""
    form = array(**fields)

    def check(name: str, value: Any) -> None:
        form(name, value)
        if len(value) != len(fields):
            raise unfit(name, f"an array of {len(fields)} elements", value)

    return check


_CONTEXT: Final[Form] = exactly(creator=ID, serial=ID)
_CHANGES: Final[Form] = each(exactly(group=COUNT, options=MAP))
_HOW: Final[Form] = exactly(allow_stale=FLAG, differing=_CHANGES)

PLAIN: Final[Form] = exactly(serial=COUNT)
CREATE: Final[Form] = exactly(
    serial=COUNT, cls=anything, groups=each(MAP), args=LIST, kwargs=MAP
)
STEP: Final[Form] = exactly(
    serial=COUNT,
    context=_CONTEXT,
    clip_norm=maybe(REAL),
    skip_nonfinite=FLAG,
    how=_HOW,
)
PREPARE: Final[Form] = exactly(serial=COUNT, context=_CONTEXT, needs_norm=FLAG)
COMMIT: Final[Form] = exactly(
    serial=COUNT, context=_CONTEXT, scale=REAL, is_kept=FLAG, how=_HOW
)
SETTLE: Final[Form] = exactly(serial=COUNT, is_applied=FLAG)
ASSIGN: Final[Form] = exactly(serial=COUNT, values=each(TENSOR), allow_stale=FLAG)
GRADIENTS: Final[Form] = exactly(serial=COUNT, context=_CONTEXT)
ADD_GROUP: Final[Form] = exactly(serial=COUNT, group=MAP)
LOAD_STATE: Final[Form] = exactly(serial=COUNT, state=MAP)
SET_OPTIONS: Final[Form] = exactly(serial=COUNT, differing=_CHANGES)
