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
    unit: 3 * index for index, unit in enumerate(["n", "u", "m", "", *"kMGTPE"], -3)
}
_BINARY: Final = {f"{letter}i": index for index, letter in enumerate("KMGTPE", 1)}


def check_label(subject: str, name: str, suffix: str = "") -> None:
    """Raise UsageError unless a name with its appended suffix is a DNS label.

    Args:
        name: begins with a letter; services must.
    """
    if _LABEL.fullmatch(name) is None:
        raise UsageError(
            f"{subject} must be a name of lower-case letters, digits and '-' that "
            f"begins with a letter and does not end with '-', not {name!r}"
        )
    characters_max = LABEL_CHARACTERS_MAX - len(suffix)
    if len(name) > characters_max:
        why = f", since pods are named {name[:8]}...{suffix}" if suffix else ""
        raise UsageError(
            f"{subject} must have at most {characters_max} characters{why}; "
            f"it has {len(name)}"
        )


def check_subdomain(subject: str, name: str) -> None:
    """Raise UsageError unless a name is valid for an object that is not in the DNS."""
    is_short = len(name) <= _SUBDOMAIN_CHARACTERS_MAX
    if not is_short or _SUBDOMAIN.fullmatch(name) is None:
        raise UsageError(
            f"{subject} must be a name of at most {_SUBDOMAIN_CHARACTERS_MAX} "
            f"lower-case letters, digits, '-' and '.', not {name!r}"
        )


def quantity(subject: str, text: str) -> Decimal:
    """Return the number that a quantity such as `500m` or `4Gi` stands for."""
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise UsageError(
            f"{subject} must be a quantity of Kubernetes, such as 500m, 2 or 4Gi, not "
            f"{text!r}"
        )
    number, unit = Decimal(match[1]), match[2] or ""
    if unit in _BINARY:
        number *= 1024 ** _BINARY[unit]
    elif unit in _POWERS:
        number = number.scaleb(_POWERS[unit])
    else:
        number = number.scaleb(int(unit[1:]))
    if number <= 0:
        raise UsageError(f"{subject} must be more than 0, not {text!r}")
    return number


def byte_quantity(subject: str, text: str) -> int:
    """Return the number of bytes that a quantity stands for."""
    number = quantity(subject, text)
    if number != number.to_integral_value():
        raise UsageError(
            f"{subject} must be a whole number of bytes, such as 512Mi or 4Gi, not "
            f"{text!r}" + ("; 'm' means thousandths" if text.endswith("m") else "")
        )
    return int(number)
