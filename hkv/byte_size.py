"""Sizes on the command line: `80GiB`, `512MB`, or plain bytes."""

from __future__ import annotations

import re

from hkv.errors import ConfigError
from hkv.limits import MAX_MEMORY

UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    UNITS[f"{_letter}B"], UNITS[f"{_letter}IB"], UNITS[_letter] = 1000**_power, 1024**_power, 1024**_power


def parse_bytes(text: str, name: str = "memory") -> int:
    """Bytes of a size: a number and a unit, `GiB` of 1024 MiB, `GB` of 1000 MB, a bare `G` like `GiB`.

    Args:
      text: as typed.
      name: option it belongs to.

    Raises:
      ConfigError: no such number or unit, not even one byte, or more than `MAX_MEMORY`.
    """
    match = re.fullmatch(r"\s*([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*([A-Za-z]*)\s*", text)
    scale = UNITS.get(match.group(2).upper()) if match else None
    if match is None or scale is None or float(match.group(1)) * scale < 1:
        raise ConfigError(name, text, "a size such as 80GiB, 512MB or 1000000")
    number = match.group(1)
    size = int(number) * scale if number.isdigit() else int(float(number) * scale)
    if size > MAX_MEMORY:
        raise ConfigError(name, text, f"at most {show_bytes(MAX_MEMORY)}")
    return size


def show_bytes(count: float) -> str:
    """A size for people, of two decimals at most: `1.5 GiB`, `416 MiB`, `3.6 KiB`, `5 B`."""
    units = ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB"))
    power, unit = next((found for found in units if count >= 1024 ** found[0]), (0, "B"))
    return f"{count / 1024**power:,.2f}".rstrip("0").rstrip(".") + f" {unit}"
