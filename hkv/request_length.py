"""The longest request on the command line: a number of tokens, or `auto`."""

from __future__ import annotations

from hkv.errors import ConfigError
from hkv.limits import MAX_TOKENS, whole_number


def parse_length(text: str | None) -> int | None:
    """Tokens of the longest request: None for the model's own, 0 for `auto`, the longest that fits.

    Args:
      text: as typed, or None.

    Raises:
      ConfigError: neither a positive number nor `auto`.
    """
    if text is None:
        return None
    if text == "auto":
        return 0
    length = whole_number(text)
    if length is None or not 1 <= length <= MAX_TOKENS:
        raise ConfigError("max_model_len", text, f"a positive number of tokens, at most {MAX_TOKENS}, or auto")
    return length
