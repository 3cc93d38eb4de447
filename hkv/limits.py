"""Numbers that users give, as they are typed, and upper bounds of them: one beyond is a slip of the pen, not a request.

Every count, size and length that comes from outside, typed or read from a file, is held against one of these before
anything is made of it, so that a slip is refused by name and neither runs for ever nor fills the memory.
"""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction

from hkv.errors import ConfigError, HKVError, SpecError

MAX_TOKENS = 2**31 - 1
"""Tokens of a block, window, chunk, step or request, and elements of a head: positions are int32 on a device."""

MAX_BLOCKS = 1 << 24
"""Blocks of a pool: the reference keeps an object for each, 2.4 GB and half a minute at this size, 268 million tokens
in blocks of 16."""

MAX_BYTES = 2**63 - 1
"""Bytes of a buffer, a page or a stride: what NumPy and a 64-bit machine can address."""

MAX_RUNS = 1 << 20
"""Stretches of bytes that are listed one by one: a block of a thousand heads has a thousand."""

MAX_MEMORY = 1 << 44
"""Bytes for the cache on one GPU, 16 TiB: the largest GPUs have a fiftieth of it."""

MAX_RANKS = 1 << 16
"""Ranks that share a model, of one kind: more than any machine that serves one has."""

MAX_SPECULATIVE_TOKENS = 1 << 16
"""Draft tokens verified in one step, and copies of a draft module: engines propose a dozen."""

MAX_STEP_MS = 24 * 3600 * 1000
"""Milliseconds of a scheduling step, a day: steps take tens of them."""

MAX_SPEED = Fraction(10**6)
"""Largest factor by which requests arrive faster, or slower, than recorded."""

MAX_COUNT = 10**9
"""Seeds, steps, requests and other things that are gone through one by one: hours, whatever each of them costs."""

MAX_SEED = 2**63 - 1
"""Seed of a random generator: a 64-bit number, as NumPy's and JAX's take."""

MAX_LANES = 1 << 18
"""States that one dispatch of the explorer steps: 64 times its default, some gigabytes."""

MAX_WORKERS = 256
"""Threads that dispatch at the same time."""

MAX_SECONDS = 366 * 24 * 3600
"""Seconds to wait or to go on, a year: the system's own timers end a little later."""

MAX_CHUNKS = 500_000
"""Chunks of prompts that a simulation of equal requests computes, half a minute's worth."""


def whole_number(text: str) -> int | None:
    """The number that ASCII digits write; None for any other text. One of more than 30 digits is beyond every limit."""
    if not re.fullmatch(r"[0-9]+", text):
        return None
    digits = text.lstrip("0")
    return int(digits or "0") if len(digits) <= 30 else 10**30


def check_whole(name: str, value: object, least: int, most: int, error: type[HKVError] = ConfigError) -> None:
    """Makes sure that a value is an int between two bounds.

    Raises:
      HKVError: it is not; of the class `error`.
    """
    if type(value) is not int or not least <= value <= most:
        raise error(name, value, f"an integer from {least} to {most}")


def check_positive(spec: object, *names: str, most: int = MAX_TOKENS) -> None:
    """Raise SpecError unless each named attribute of `spec` is an int of at least 1 and at most `most`."""
    _check(spec, 1, most, "a positive integer", names)


def check_not_negative(spec: object, *names: str) -> None:
    """Raise SpecError unless each named attribute of `spec` is an int of at least 0."""
    _check(spec, 0, MAX_TOKENS, "a non-negative integer", names)


def _check(spec: object, least: int, most: int, expected: str, names: tuple[str, ...]) -> None:
    for name in names:
        value = getattr(spec, name)
        if type(value) is not int or not least <= value <= most:
            raise SpecError(f"{type(spec).__name__}.{name}", value, f"{expected}, at most {most}")


def counted(number: int, noun: str) -> str:
    """A number and what it counts: `1 request`, `2,000 requests`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


# Sizes: `80GiB`, `512MB`, or plain bytes.

UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    UNITS[f"{_letter}B"], UNITS[f"{_letter}IB"], UNITS[_letter] = 1000**_power, 1024**_power, 1024**_power


def parse_bytes(text: str, name: str = "memory") -> int:
    """Bytes of a size: a number and a unit, `GiB` of 1024 MiB, `GB` of 1000 MB, a bare `G` like `GiB`.

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


# The longest request: a number of tokens, or `auto`.

MULTIPLES = {"k": 10**3, "m": 10**6, "K": 1 << 10, "M": 1 << 20}
"""Letters behind a number, as vLLM 0.33 reads them (`human_readable_int`): small ones decimal, capitals binary."""


def parse_length(text: str | None) -> int | None:
    """Tokens of the longest request: None for the model's own, 0 for `auto`, the longest that fits.

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
