"""Many replays of one trace: the values that options take, and what their results say together."""

from __future__ import annotations

import csv
import io
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from hkv.errors import ConfigError
from hkv.limits import MAX_BLOCKS, parse_bytes, whole_number

MAX_POINTS = 10_000
"""Combinations of a sweep."""

MEMORY, BLOCKS, TIER = "--memory", "--num-blocks", "--offload"
SPLIT = {
    **dict.fromkeys(
        (
            *("--model", MEMORY, "--block-size", "--kv-dtype", "--tp", "--dialect", "--draft"),
            *("--lookahead", "--step-tokens", "--decode-tokens", "--max-running", "--closed-loop"),
        ),
        ",",
    ),
    **dict.fromkeys(("--groups", BLOCKS, "--eagle"), ";"),
}
"""Options of `hkv replay` that may have several values, and what stands between them. Options that a dialect adds may
have several between commas, unless they stand here."""

COLUMNS = (
    "hit_rate",
    "hit_tokens",
    "prompt_tokens",
    "blocks",
    "evictions",
    "preemptions",
    "put_off",
    "never_fit",
    "too_long",
)
"""Numbers of each point: totals of its replay."""

TIERED = ("loaded_tokens", "tier_stored", "tier_read", "tier_loaded", "tier_refused")
"""Totals of each point besides `COLUMNS` where its cache has a second tier: hit tokens that were loaded, and in its
chunks what was stored, read at least once of that, and loaded in all; stores that found no room."""

OPTIMAL = "optimal_tokens"
"""Column of hit tokens that no choice of evictions exceeds, where it was asked for."""

Row = Mapping[str, Any]
"""One point: `options`, a map of those that vary, and `COLUMNS`."""


def values(option: str, text: str) -> list[str]:
    """The values of an option, one by one: `a,b`, or `16GiB..1TiB:12`, so many from end to end in equal ratios."""
    if option not in (MEMORY, BLOCKS) or ".." not in text:
        return [part.strip() for part in text.split(SPLIT.get(option, ","))]
    ends, _, count = text.partition(":")
    low, _, high = ends.partition("..")
    number = whole_number(count)
    if number is None or not 2 <= number <= MAX_POINTS:
        raise ConfigError(option, text, f"LOW..HIGH:N, N points from 2 to {MAX_POINTS}")
    first, last = (_size(option, end) for end in (low, high))
    if not first < last:
        raise ConfigError(option, text, "LOW..HIGH:N, the low end below the high one")
    sizes = [round(first * math.exp(math.log(last / first) * place / (number - 1))) for place in range(number)]
    return [str(size) for size in sorted({first, *sizes[1:-1], last})]


def _size(option: str, text: str) -> int:
    if option == MEMORY:
        return parse_bytes(text)
    pools = [whole_number(part.strip()) for part in text.split(",")]
    blocks = [each for each in pools if each is not None and 2 <= each <= MAX_BLOCKS]
    if len(blocks) != len(pools):
        raise ConfigError(option, text, f"a number of blocks from 2 to {MAX_BLOCKS}, or one for each pool")
    return sum(blocks)


def points(axes: Mapping[str, Sequence[str]]) -> list[dict[str, str]]:
    """Every combination of the values of options, the last option's values following each other."""
    count = math.prod(len(each) for each in axes.values())
    if count > MAX_POINTS:
        raise ConfigError("sweep", count, f"at most {MAX_POINTS} combinations")
    return [dict(zip(axes, each, strict=True)) for each in itertools.product(*axes.values())]


def told_apart(axes: Mapping[str, Sequence[object]]) -> list[str]:
    """Options that points are told apart by: all but one size of the GPU's pool beside several of the second tier."""
    tiers = len(set(axes.get(TIER, ()))) > 1
    return [name for name, each in axes.items() if not (tiers and name in (MEMORY, BLOCKS) and len(each) == 1)]


def size_of(options: Mapping[str, str]) -> float:
    """The size that a point has on its line: bytes of memory or blocks of all pools; of neither, the second tier's."""
    if MEMORY in options:
        return float(parse_bytes(options[MEMORY]))
    return float(_size(BLOCKS, options[BLOCKS])) if BLOCKS in options else tier_size(options.get(TIER, "0"))


def tier_size(text: str) -> float:
    """The second tier's size: a number of chunks, or bytes."""
    chunks = whole_number(text)
    return float(parse_bytes(text, "offload") if chunks is None else chunks)


def size_name(options: Mapping[str, str], of_model: bool = False) -> str:
    """Name of what a point's size counts; a second tier beside a model is in bytes."""
    known = {MEMORY: "memory", BLOCKS: "blocks"}
    return next((name for size, name in known.items() if size in options), "host memory" if of_model else "chunks")


def line_of(options: Mapping[str, str]) -> str:
    """Name of the line that a point is on: its options but for the size."""
    sizes = (MEMORY, BLOCKS) if MEMORY in options or BLOCKS in options else (TIER,)
    return " ".join(f"{name} {value}" for name, value in options.items() if name not in sizes)


def lines(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows that differ in nothing but the size, smallest first, by their other options."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(line_of(row["options"]), []).append(row)
    return {rest: sorted(each, key=lambda row: size_of(row["options"])) for rest, each in found.items()}


def refused(row: Row) -> int:
    """Requests of a point that were refused for good: too long, or too large for the whole pool."""
    return row["too_long"] + row["never_fit"]


def optimal_rate(row: Row) -> float:
    """The hit rate that no choice of evictions exceeds, of a row that has `OPTIMAL`; never above 1."""
    return min(1.0, row[OPTIMAL] / row["prompt_tokens"]) if row["prompt_tokens"] else 0.0


def first_reaching(line: Sequence[Row], rate: float) -> Row | None:
    """The smallest size of a line whose hit rate is at least this; None where none is."""
    return next((row for row in line if row["hit_rate"] >= rate), None)


def knee(line: Sequence[Row]) -> Row | None:
    """The point that lies furthest above the straight line between the ends, sizes taken as logarithms.

    None where there are fewer than three points, or none lies above it. No second tier is no point of its line.
    """
    line = [row for row in line if size_of(row["options"])]
    if len(line) < 3:
        return None
    sizes = [math.log(size_of(row["options"])) for row in line]
    rates = [row["hit_rate"] for row in line]
    slope = (rates[-1] - rates[0]) / (sizes[-1] - sizes[0])
    above = [rate - rates[0] - slope * (size - sizes[0]) for size, rate in zip(sizes, rates, strict=True)]
    best = max(range(len(line)), key=above.__getitem__)
    return line[best] if above[best] > 1e-9 else None


def as_csv(rows: Sequence[Row]) -> bytes:
    """The rows as CSV with a heading: the options that vary, without dashes, `COLUMNS`, and others where known."""
    text = io.StringIO()
    names = list(dict.fromkeys(name for row in rows for name in row["options"]))
    writer = csv.writer(text, lineterminator="\n")
    columns = [*COLUMNS, *(name for name in (*TIERED, OPTIMAL) if any(name in row for row in rows))]
    writer.writerow([*(name.lstrip("-").replace("-", "_") for name in names), *columns])
    for row in rows:
        writer.writerow([*(row["options"].get(name, "") for name in names), *(row[column] for column in columns)])
    return text.getvalue().encode()
