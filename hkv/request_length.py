"""The longest request on the command line: a number of tokens, or `auto`."""

from __future__ import annotations

from hkv.errors import ConfigError


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
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise ConfigError("max_model_len", text, "a positive number of tokens, or auto")
    return int(text)
