"""Tokens that give access to a page."""

from __future__ import annotations

from typing import Final

from asyncrpc.errors import UsageError

TOKEN_CHARACTERS_MIN: Final = 16  # of base64: 96 bits, too many to guess


def check_token(token: object) -> None:
    """Refuse an invalid token; the error does not show it: it may be nearly right."""
    wanted = f"at least {TOKEN_CHARACTERS_MIN} printable ASCII characters"
    if not isinstance(token, str):
        raise UsageError(f"token must be {wanted}, not a {type(token).__name__}")
    is_plain = token.isascii() and token.isprintable()
    if not is_plain or len(token) < TOKEN_CHARACTERS_MIN:
        raise UsageError(f"token must be {wanted}")
