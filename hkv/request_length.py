"""The longest request on the command line: a number of tokens, or `auto`."""

from __future__ import annotations

import re
from decimal import Decimal

from hkv.errors import ConfigError
from hkv.limits import MAX_TOKENS, whole_number

MULTIPLES = {"k": 10**3, "m": 10**6, "K": 1 << 10, "M": 1 << 20}
"""Letters behind a number, as vLLM 0.33 reads them (`human_readable_int`): small ones decimal, capitals binary."""


def parse_length(text: str | None) -> int | None:
    """Tokens of the longest request: None for the model's own, 0 for `auto`, the longest that fits.

    Args:
      text: as typed, `131072`, `128K`, `25.6k` or `auto`, or None.

    Raises:
      ConfigError: neither a positive number nor `auto`.
    """
    if text is None:
        return None
    if text == "auto":
        return 0
    length = _tokens(text)
    if length is None or not 1 <= length <= MAX_TOKENS:
        raise ConfigError("max_model_len", text, f"a positive number of tokens, at most {MAX_TOKENS}, or auto")
    return length


def _tokens(text: str) -> int | None:
    """The number that a text writes, its letter included; None if it writes none."""
    if not re.fullmatch(r"[0-9]{1,30}(\.[0-9]{1,30}(?=[km]$))?[kmKM]", text):
        return whole_number(text)
    return int(Decimal(text[:-1]) * MULTIPLES[text[-1]])
