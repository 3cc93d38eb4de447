"""Reading optimised HLO: which instructions make a new array of some size."""

from __future__ import annotations

import math
import re

INSTRUCTION = re.compile(r"= \w+\[([\d,]+)\]\S* (copy|copy-start|select|transpose|gather|scatter|concatenate|pad)\(")


def large_copies(text: str, least: int) -> list[str]:
    """Instructions that copy, or rebuild, at least `least` elements."""
    found = []
    for line in text.splitlines():
        match = INSTRUCTION.search(line)
        if match and math.prod(int(size) for size in match[1].split(",")) >= least:
            found.append(line.strip())
    return found
