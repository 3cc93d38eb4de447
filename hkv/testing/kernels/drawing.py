"""Drawing of cases, and smaller cases than one: sizes that differ, sizes that coincide, ids at every edge.

Decisions come from whatever makes them (`hkv.contract.traffic.Choices`): a seed, or Hypothesis, which shrinks them.
Geometry is drawn apart from ids and contents, so that a kernel whose geometries are compiled can keep one for a while.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from hkv.chunks.formats import TRAITS, EngineKVFormat
from hkv.contract.traffic import Choices
from hkv.errors import HKVError, OperationError
from hkv.testing.kernels.cases import CHUNKED, DTYPES, FORMATS, ONE_BYTE_FLOATS, Case, Supports, is_far
from hkv.testing.kernels.placement import FAMILIES, SCALED

TRIES = 2000
"""Sizes drawn before a kernel counts as one that no layout fits; of contents with scales one in twenty fits."""


def draw_case(choices: Choices, supports: Supports, geometry: Choices | None = None, wide: bool = False) -> Case:
    """A case of the kernel's operation that is legal; it may have more than the kernel supports.

    Args:
      choices: decides ids and contents.
      supports: sizes to choose from.
      geometry: decides sizes, counts and layouts; `choices` if it is None.
      wide: one size is none of the small ones: no token at all, tens of them, wide heads, hundreds of blocks.
    """
    geometry = choices if geometry is None else geometry
    for _ in range(TRIES):
        try:
            if supports.operation in CHUNKED:
                return _with_chunk_ids(choices, _draw_chunks(geometry, supports))
            case = _draw_sizes(geometry, supports)
            if wide:
                case = _widened(geometry, case, supports)
            case.placement()
            return _with_ids(choices, case, supports)
        except HKVError:
            continue
    raise OperationError("sizes", supports, "sizes that some layout can hold")


def _draw_sizes(choices: Choices, supports: Supports) -> Case:
    """Sizes, layout and number of ids of a call; ids are still -1."""
    operation = supports.operation
    content = choices.pick(supports.contents or ("keys and values",) * 5 + ("latent", SCALED))
    dtype = choices.pick(supports.dtypes or DTYPES)
    source = ""
    if operation == "write" and (dtype in ONE_BYTE_FLOATS or content == SCALED) and choices.chance(50):
        source = choices.pick(("bfloat16", "float32", "float16"))
    if operation == "attention":
        dtype = choices.pick(supports.dtypes or ("float32", "bfloat16", "float16"))
        content = "keys and values"
    sizes = supports.head_sizes or (1, 2, 3, 4, 5, 8)
    key, block = choices.pick(sizes), choices.pick(supports.block_sizes or (1, 2, 3, 4, 6))
    heads = 1 if content == "latent" else choices.pick(supports.heads or (1, 2, 3, 4, block))
    case = Case(
        operation=operation,
        layout=choices.pick(supports.known_layouts(FAMILIES)),
        content=content,
        dtype="int8" if content == SCALED else dtype,
        block_size=block,
        heads=heads,
        key_size=key,
        value_size=key if content == "latent" or choices.chance(70) else choices.pick(sizes),
        blocks=choices.pick((2, 3, 4, 5, heads + 1)),
        layers=choices.pick((1, 2, 3)),
        pieces=choices.pick([n for n in (1, 1, 2, 3) if block % n == 0]),
        padding=choices.pick((0, 0, 0, 8, 64)),
        offset=choices.pick((0, 0, 16, 128)),
        source_dtype=source,
        scales=(choices.pick((0.25, 0.5, 2.0, 4.0)), choices.pick((0.125, 1.0, 8.0))) if source else (1.0, 1.0),
        row_padding=choices.pick((0, 0, 1, 6)) if operation in ("write", "scatter") else 0,
    )
    if operation == "attention":
        return _with_requests(choices, case)
    if choices.chance(4) and "far blocks" not in supports.lacks:
        page = key * heads * block * (1 if content == "latent" else 2)
        case = msgspec.structs.replace(case, blocks=(1 << 31) // max(page, 2) + 9, layers=1)  # ids are int32
    count = choices.integer(1, 7 if operation == "write" else 4)
    if operation == "write" and supports.tokens:
        count = choices.pick(supports.tokens)
        case = msgspec.structs.replace(case, blocks=max(case.blocks, -(-count // block) + 1))
    return msgspec.structs.replace(case, **{"slots" if operation == "write" else "table": (-1,) * count})


def _widened(choices: Choices, case: Case, supports: Supports) -> Case:
    """The case with one size that small ones never have, as far as the kernel takes it."""
    if case.operation == "attention":
        return case
    field = "slots" if case.operation == "write" else "table"
    changes: list[dict[str, Any]] = [] if is_far(case) else [{"blocks": 257, "layers": 1}]
    if not (supports.tokens and case.operation == "write"):
        changes += [change | {field: (-1,) * choices.pick((0, 33, 130))} for change in changes] + [{field: ()}]
    if not supports.head_sizes:
        size = choices.pick((40, 136))
        changes.append({"key_size": size, "value_size": size})
    extremes = bool(case.source_dtype) and case.content != SCALED and "NaN and infinity" not in supports.lacks
    return msgspec.structs.replace(case, extremes=extremes, **choices.pick(changes or [{}]))


def _with_requests(choices: Choices, case: Case) -> Case:
    """Ragged requests, and as many blocks as they need."""
    lengths = tuple(choices.integer(1, 3 * case.block_size + 1) for _ in range(choices.integer(1, 3)))
    queries = tuple(choices.pick((1, min(2, length), length)) for length in lengths)
    needed = sum(-(-length // case.block_size) for length in lengths)
    window = choices.integer(1, max(lengths)) if choices.chance(40) else 0
    grouped, poison = choices.pick((1, 2, 3)), choices.chance(70)
    return msgspec.structs.replace(
        case, lengths=lengths, queries=queries, blocks=needed + 2, window=window, query_heads=grouped, poison=poison
    )


def _with_ids(choices: Choices, case: Case, supports: Supports) -> Case:
    """The case with its ids and its contents drawn."""
    seed = choices.integer(0, 1 << 30)
    blocks = list(range(case.blocks)) if not is_far(case) else _far_ids(case.blocks)
    missing = "missing ids" in supports.has
    case = msgspec.structs.replace(case, payloads="NaN payloads" not in supports.lacks)
    match case.operation:
        case "attention":
            changes: dict[str, Any] = {"tables": _tables(choices, case)}
        case "write":
            places = [block * case.block_size + slot for block in blocks for slot in range(case.block_size)]
            beyond = case.blocks * case.block_size + choices.integer(0, case.block_size)
            changes = {"slots": _ids(choices, places, len(case.slots), (beyond,) if missing else ())}
        case "copy_blocks":
            count = min(len(case.table), len(blocks))
            targets = _ids(choices, blocks, count, (case.blocks,) if missing else ())
            overlap = choices.chance(40)
            free = blocks if overlap else [block for block in blocks if block not in targets]
            sources = tuple(choices.pick(free or [-1]) for _ in targets)
            changes = {"targets": targets, "table": sources}
        case _:
            wrong = (case.blocks, -2) if missing else ()
            repeated = blocks * 2 if case.operation == "zero" and choices.chance(30) else blocks
            changes = {"table": _ids(choices, repeated, len(case.table), wrong)}
    return msgspec.structs.replace(case, layer=choices.integer(0, case.layers - 1), seed=seed, **changes)


def _far_ids(blocks: int) -> list[int]:
    """Blocks at both ends of a pool of more than 2^31 elements, and in its middle."""
    return [0, 1, 2, blocks // 2, blocks // 2 + 1, blocks - 3, blocks - 2, blocks - 1]


def _ids(choices: Choices, real: list[int], count: int, wrong: tuple[int, ...]) -> tuple[int, ...]:
    """Ids of which none is there twice, unless `real` has it twice; now and then -1, or a wrong one."""
    left, found = list(real), []
    for _ in range(count):
        if not left or choices.chance(15):
            found.append(choices.pick((-1, *wrong)))
        else:
            found.append(left.pop(choices.integer(0, len(left) - 1)))
    return tuple(found)


def _tables(choices: Choices, case: Case) -> tuple[tuple[int, ...], ...]:
    """Rows of blocks, none twice, as wide as the longest; the null block behind a row's end and below its window."""
    free = list(range(1, case.blocks))
    width = max(-(-length // case.block_size) for length in case.lengths)
    rows = []
    for length, new in zip(case.lengths, case.queries, strict=True):
        used = -(-length // case.block_size)
        row = [free.pop(choices.integer(0, len(free) - 1)) for _ in range(used)]
        lowest = max(0, length - new - case.window + 1) if case.window else 0
        row[: lowest // case.block_size] = [0] * (lowest // case.block_size)
        rows.append((*row, *(0,) * (width - used)))
    return tuple(rows)


def _draw_chunks(choices: Choices, supports: Supports) -> Case:
    """Pages of one chunk format."""
    name = choices.pick(supports.known_layouts(FORMATS))
    traits = TRAITS[EngineKVFormat[name]]
    indexer = name == EngineKVFormat.NL_X_NB_BSV_BSS.name
    size = 12 + 4 if indexer else choices.pick(supports.head_sizes or (2, 4, 6))
    heads = 1 if traits.mla or indexer else choices.pick(supports.heads or (1, 2, 3, 4))
    objects = choices.integer(1, 2)
    return Case(
        operation=supports.operation,
        layout=name,
        dtype="uint8" if indexer else choices.pick(supports.dtypes or ("bfloat16", "float32", "uint8")),
        block_size=choices.pick(supports.block_sizes or (1, 2, 3)),
        heads=heads,
        key_size=size,
        value_size=size,
        blocks=choices.pick((2, 3, 5)),
        layers=choices.pick((1, 2, 3)),
        padding=choices.pick((0, 0, 2, 8)) if traits.padded_blocks else 0,
        offset=choices.pick((0, 0, 24)),
        objects=objects,
        table=(-1,) * objects * choices.pick((1, 2)),
    )


def _with_chunk_ids(choices: Choices, case: Case) -> Case:
    ids = _ids(choices, list(range(case.blocks)), len(case.table), ())
    skip = choices.integer(1, len(ids) - 1) if len(ids) > 1 and choices.chance(30) else 0
    return msgspec.structs.replace(case, table=ids, skip=skip, seed=choices.integer(0, 1 << 30))


# Smaller cases.


def smaller(case: Case) -> Iterator[Case]:
    """Cases with one number less, those that shrink most first; not all of them are legal."""
    for change in _reductions(case):
        yield msgspec.structs.replace(case, **change)


def _reductions(case: Case) -> Iterator[dict[str, Any]]:
    plain: Sequence[tuple[str, Any]] = (
        ("padding", 0), ("offset", 0), ("row_padding", 0), ("pieces", 1), ("window", 0), ("skip", 0),
        ("query_heads", 1),
    )  # fmt: skip
    for name, least in plain:
        if getattr(case, name) != least:
            yield {name: least}
    for name in ("slots", "table"):
        yield from _without_one(case, name)
    if len(case.lengths) > 1:
        for index in range(len(case.lengths)):
            names = ("tables", "queries", "lengths")
            yield {name: _left_out(getattr(case, name), index) for name in names}
    if case.layers > 1:
        yield {"layers": 1, "layer": 0}
        yield {"layers": 2, "layer": min(case.layer, 1)}
    if case.key_size != case.value_size:
        yield {"value_size": case.key_size}
    for name in ("heads", "key_size", "value_size"):
        for less in sorted({1, 2, getattr(case, name) - 1}):
            if 0 < less < getattr(case, name):
                both = {"key_size": less, "value_size": less} if case.key_size == case.value_size else {name: less}
                yield both if name != "heads" else {"heads": less}
    yield from _fewer_blocks(case)


def _fewer_blocks(case: Case) -> Iterator[dict[str, Any]]:
    """Fewer blocks, and fewer slots in each, with ids that follow."""
    ids = [*case.table, *case.targets, *(block for row in case.tables for block in row)]
    ids += [slot // case.block_size for slot in case.slots if slot >= 0]
    used = max([*ids, 1]) + 1
    if used < case.blocks and not (is_far(case) and used > 1 << 12):
        yield {"blocks": used}
    low = sorted({block for block in ids if block > 0})
    if low and low != list(range(1, len(low) + 1)) and not is_far(case):
        to = dict(zip(low, range(1, len(low) + 1), strict=True))
        slots = tuple(
            s if s < 0 else to.get(s // case.block_size, 0) * case.block_size + s % case.block_size for s in case.slots
        )
        rows = tuple(tuple(to.get(block, block) for block in row) for row in case.tables)
        yield {
            "slots": slots,
            "table": tuple(to.get(block, block) for block in case.table),
            "targets": tuple(to.get(block, block) for block in case.targets),
            "tables": rows,
        }
    for less in sorted({1, 2, case.block_size // 2}):
        if 0 < less < case.block_size and not case.tables:
            slots = tuple(s if s < 0 else s // case.block_size * less + s % case.block_size for s in case.slots)
            if all(s < 0 or s % case.block_size < less for s in case.slots):
                yield {"block_size": less, "slots": slots, "pieces": min(case.pieces, less)}


def _without_one(case: Case, name: str) -> Iterator[dict[str, Any]]:
    ids = getattr(case, name)
    if len(ids) < 2 or case.operation in CHUNKED:
        return
    for index in range(len(ids)):
        change = {name: _left_out(ids, index)}
        if case.targets:
            change["targets"] = _left_out(case.targets, index)
        yield change


def _left_out(values: tuple[Any, ...], index: int) -> tuple[Any, ...]:
    return (*values[:index], *values[index + 1 :])


def size_of(case: Case) -> int:
    """Elements that a case moves, and what else makes it large: cases are compared by it."""
    count = len(case.slots) + (len(case.table) + sum(case.lengths)) * case.block_size
    elements = (count + 1) * case.heads * (case.key_size + case.value_size)
    return elements + case.layers + case.blocks
