"""Quantities and names, as Kubernetes writes them.

Source: kubernetes/apimachinery, pkg/api/resource/quantity.go; RFC 1035, section 2.3.1.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Final

from asyncrpc.errors import UsageError

LABEL_CHARACTERS_MAX: Final = 63  # RFC 1035: of one label of a name in the DNS
_LABEL: Final = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?", re.ASCII)
_SUBDOMAIN: Final = re.compile(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?", re.ASCII)
_SUBDOMAIN_CHARACTERS_MAX: Final = 253
_QUANTITY: Final = re.compile(
    r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]{1,2})?",
    re.ASCII,
)
_POWERS: Final = {
    one: 3 * index for index, one in enumerate(["n", "u", "m", "", *"kMGTPE"], -3)
}
_BINARY: Final = {f"{letter}i": index for index, letter in enumerate("KMGTPE", 1)}


def check_label(what: str, name: str, suffix: str = "") -> None:
    """Raise UsageError unless a name with its appended suffix is a DNS label.

    Args:
        name: begins with a letter; services must.
        suffix: the longest that a controller appends to it.

    Raises:
        UsageError: the name is not a label, or is too long.
    """
    if _LABEL.fullmatch(name) is None:
        raise UsageError(
            f"{what} must be a name of lower-case letters, digits and '-' that begins "
            f"with a letter and does not end with '-', not {name!r}"
        )
    left = LABEL_CHARACTERS_MAX - len(suffix)
    if len(name) > left:
        why = f", since pods are named {name[:8]}...{suffix}" if suffix else ""
        raise UsageError(
            f"{what} must have at most {left} characters{why}; it has {len(name)}"
        )


def check_subdomain(what: str, name: str) -> None:
    """Raise UsageError unless a name is valid for an object that is not in the DNS.

    Raises:
        UsageError: the name has other characters, or is too long.
    """
    is_short = len(name) <= _SUBDOMAIN_CHARACTERS_MAX
    if not is_short or _SUBDOMAIN.fullmatch(name) is None:
        raise UsageError(
            f"{what} must be a name of at most {_SUBDOMAIN_CHARACTERS_MAX} lower-case "
            f"letters, digits, '-' and '.', not {name!r}"
        )


def quantity(what: str, text: str) -> Decimal:
    """Return the number that a quantity such as `500m` or `4Gi` stands for.

    Raises:
        UsageError: the text is not a quantity, or not positive.
    """
    found = _QUANTITY.fullmatch(text)
    if found is None:
        raise UsageError(
            f"{what} must be a quantity of Kubernetes, such as 500m, 2 or 4Gi, not "
            f"{text!r}"
        )
    number, unit = Decimal(found[1]), found[2] or ""
    if unit in _BINARY:
        number *= 1024 ** _BINARY[unit]
    elif unit in _POWERS:
        number = number.scaleb(_POWERS[unit])
    else:
        number = number.scaleb(int(unit[1:]))
    if number <= 0:
        raise UsageError(f"{what} must be more than 0, not {text!r}")
    return number


def byte_quantity(what: str, text: str) -> int:
    """Return the number of bytes that a quantity stands for.

    Raises:
        UsageError: the text is not a whole number of bytes: `128m` is 0.128 bytes.
    """
    found = quantity(what, text)
    if found != found.to_integral_value():
        raise UsageError(
            f"{what} must be a whole number of bytes, such as 512Mi or 4Gi, not "
            f"{text!r}" + ("; 'm' means thousandths" if text.endswith("m") else "")
        )
    return int(found)
