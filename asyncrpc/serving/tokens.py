"""Tokens that let somebody look at a page."""

from __future__ import annotations

from typing import Final

from asyncrpc.errors import UsageError

TOKEN_CHARACTERS_MIN: Final = 16  # of base64, 96 bits: nobody guesses that


def check_token(token: object) -> None:
    """Refuse what is no token; it is not shown: it may be nearly right."""
    wanted = f"at least {TOKEN_CHARACTERS_MIN} printable characters of ASCII"
    if not isinstance(token, str):
        raise UsageError(f"token must be {wanted}, not a {type(token).__name__}")
    is_plain = token.isascii() and token.isprintable()
    if not is_plain or len(token) < TOKEN_CHARACTERS_MIN:
        raise UsageError(f"token must be {wanted}")
