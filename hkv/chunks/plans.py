"""Plans of stores and retrieves, as data: which blocks go to which objects, in which launches; and the lookup before.

As LMCache 0.5.6 has them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from typing import Literal, TypeVar

from hkv.chunks.kernel_groups import KernelGroup
from hkv.chunks.objects import ObjectGroup
from hkv.errors import OperationError

Item = TypeVar("Item")
Direction = Literal["store", "retrieve"]

NULL_BLOCK = 0
STORE_BATCH = 1
RETRIEVE_BATCH = 4


@dataclasses.dataclass(frozen=True)
class Launch:
    """One transfer between the pages of one kernel group and the objects of some consecutive chunks.

    Block ids are listed object by object; the first `skip` of them are not moved.
    """

    group: int
    block_ids: tuple[int, ...]
    objects: tuple[int, ...]
    skip: int


def blocks_per_window(group: KernelGroup, chunk: int, full_window: bool = False) -> int:
    """Blocks of a chunk that an object holds: those of the window, when that is shorter than the chunk."""
    return group.num_blocks(min(chunk, group.kept_tokens(chunk, full_window)))


def downsample(block_ids: Sequence[int], per_chunk: int, per_window: int) -> list[int]:
    """The last `per_window` of every `per_chunk` block ids, which are those of whole chunks."""
    if len(block_ids) % per_chunk:
        raise OperationError("block_ids", len(block_ids), f"a multiple of {per_chunk} blocks a chunk")
    starts = range(0, len(block_ids), per_chunk)
    return [block for start in starts for block in block_ids[start + per_chunk - per_window : start + per_chunk]]


def skip_in_window(per_chunk: int, per_window: int, blocks: int) -> int:
    """Number of downsampled blocks among the first `blocks` blocks: those that fall in a kept tail."""
    if per_chunk == per_window:
        return blocks
    return blocks // per_chunk * per_window + max(0, blocks % per_chunk - (per_chunk - per_window))


def batches(items: Sequence[Item], batch: int, skip: int = 0) -> Iterator[tuple[int, tuple[Item, ...]]]:
    """`(start, items)` of consecutive batches after the first `skip` items."""
    if batch < 1:
        raise OperationError("batch", batch, "at least 1")
    if skip < 0:
        raise OperationError("skip", skip, "at least 0")
    for start in range(skip, len(items), batch):
        yield start, tuple(items[start : start + batch])


def null_chunks(
    groups: Sequence[KernelGroup],
    object_group: ObjectGroup,
    block_ids: Sequence[Sequence[int]],
    chunk: int,
    null_block: int = NULL_BLOCK,
    bugs: frozenset[str] = frozenset(),
) -> list[bool]:
    """Per chunk, whether every block an object would hold is the null block, so that there is nothing to store.

    LMCache 0.5.6 looks at all blocks of the chunk, those outside the window too (bug `lmcache-null-mask`). Block ids
    are given per kernel group, one a block, whole chunks; the null block is -1 where 0 is a real one.
    """
    held: list[list[Sequence[int]]] = []
    for member in object_group.members:
        per_chunk = groups[member].num_blocks(chunk)
        kept = per_chunk if "lmcache-null-mask" in bugs else blocks_per_window(groups[member], chunk)
        ids = block_ids[member]
        starts = range(0, len(ids) // per_chunk * per_chunk, per_chunk)
        held.append([ids[start + per_chunk - kept : start + per_chunk] for start in starts])
    return [all(block == null_block for ids in row for block in ids) for row in zip(*held, strict=True)]


def check_block_ids(
    groups: Sequence[KernelGroup], block_ids: Sequence[Sequence[int]], chunk: int, num_chunks: int
) -> None:
    """Raises OperationError unless every kernel group has the ids of exactly `num_chunks` chunks."""
    if len(block_ids) != len(groups):
        raise OperationError("block_ids", len(block_ids), f"a list for each of the {len(groups)} kernel groups")
    for index, (group, ids) in enumerate(zip(groups, block_ids, strict=True)):
        expected = num_chunks * group.num_blocks(chunk)
        if len(ids) != expected:
            raise OperationError(f"block_ids[{index}]", len(ids), f"{expected} ids, those of {num_chunks} chunks")


def plan_transfer(
    groups: Sequence[KernelGroup],
    object_group: ObjectGroup,
    block_ids: Sequence[Sequence[int]],
    chunk: int,
    direction: Direction,
    present: Sequence[bool],
    skip_tokens: int = 0,
    batch: int | None = None,
) -> list[Launch]:
    """Launches that move one object group's chunks, in order. Nothing is moved unless the whole plan is sound.

    A retrieve reads the last `object_group.window` chunks only. A skip is floored, per kernel group, to its own block:
    tokens between that and `skip_tokens` are written again.

    Args:
      groups: all kernel groups.
      object_group: index of the object group.
      block_ids: per kernel group, `num_blocks(chunk)` ids a chunk; not yet downsampled, not changed.
      chunk: tokens per chunk.
      direction: `store` (pages to objects) or `retrieve`.
      present: per chunk, whether it has an object.
      skip_tokens: tokens from the first chunk's start that a retrieve leaves alone.
      batch: objects per launch; None for LMCache's, 1 for a store and 4 for a retrieve.

    Raises:
      OperationError: an object that a retrieve would read is missing; ids that are not those of the chunks.
    """
    if direction not in ("store", "retrieve"):
        raise OperationError("direction", direction, "store or retrieve")
    num_chunks = len(present)
    check_block_ids(groups, block_ids, chunk, num_chunks)
    batch = batch or (STORE_BATCH if direction == "store" else RETRIEVE_BATCH)
    windowed = direction == "retrieve" and object_group.window >= 1
    first = max(0, num_chunks - object_group.window) if windowed else 0
    kept = {g: downsample(block_ids[g], groups[g].num_blocks(chunk), blocks_per_window(groups[g], chunk))
            for g in object_group.members}  # fmt: skip
    launches: list[Launch] = []
    for start, objects in batches(range(num_chunks), batch, first):
        end = start + len(objects)
        if not all(present[start:end]):
            if direction == "retrieve":
                missing = next(index for index in objects if not present[index])
                raise OperationError("present", f"no object for chunk {missing}", "every chunk a retrieve reads")
            continue
        skipped = max(start * chunk, skip_tokens) - start * chunk
        if skipped < len(objects) * chunk:
            launches += [_launch(groups, g, kept[g], objects, chunk, skipped) for g in object_group.members]
    return launches


def _launch(
    groups: Sequence[KernelGroup], member: int, kept: Sequence[int], objects: tuple[int, ...], chunk: int, skipped: int
) -> Launch:
    group = groups[member]
    per_chunk, per_window = group.num_blocks(chunk), blocks_per_window(group, chunk)
    ids = kept[objects[0] * per_window : (objects[-1] + 1) * per_window]
    return Launch(member, tuple(ids), objects, skip_in_window(per_chunk, per_window, group.num_blocks(skipped)))


def host_copy_pieces(offset: int, nbytes: int, alignment: int) -> list[int]:
    """Bytes of each piece of a host copy, so that none crosses a multiple of `alignment`, a power of two.

    Each aligned span of host memory is page-locked by itself, and one copy must not touch two.
    """
    if alignment < 1 or alignment & (alignment - 1):
        raise OperationError("alignment", alignment, "a power of two")
    if offset < 0 or nbytes < 0:
        raise OperationError("offset, nbytes", (offset, nbytes), "non-negative byte counts")
    pieces: list[int] = []
    position, end = offset, offset + nbytes
    while position < end:
        stop = min(end, (position // alignment + 1) * alignment)
        pieces.append(stop - position)
        position = stop
    return pieces


def retrieve_range(
    engine_hit: int, stored_hit: int, prompt: int, chunk: int, block_multiple: int
) -> tuple[int, int, int]:
    """`(start, end, skip_tokens)` of a retrieve for a vLLM request; one token of the prompt is always left to compute.

    The engine's own hit is floored to `block_multiple`, the least common multiple of the groups' tokens per block.
    """
    have = engine_hit // block_multiple * block_multiple
    end = stored_hit - 1 if stored_hit == prompt else stored_hit
    start = have // chunk * chunk
    return start, end, have - start


def store_range(
    num_tokens: int, covered: Sequence[int], computed: int, stored: int, chunk: int, limit: int | None = None
) -> tuple[int, int]:
    """`(start, end)` of the tokens that can be stored now, in whole chunks.

    A token is stored once it is `covered` by the block ids of every kernel group and `computed`: its values are in the
    pages, scheduled or from a hit. `limit` is the most tokens to store of this request (its prompt, where decode tokens
    are not kept).
    """
    end = min([num_tokens, computed, *covered] + ([] if limit is None else [limit])) // chunk * chunk
    return stored, max(stored, end)


# Lookup: the longest prefix that stored chunks can serve, over object groups with windows and over ranks.


@dataclasses.dataclass(frozen=True)
class ChunkRow:
    """Indices of the chunks of one (object group, rank) that are stored.

    `window` is the number of chunks at the end of a prefix that must be there; -1 (or 0) for all of them.
    """

    present: frozenset[int]
    window: int = -1

    @classmethod
    def of(cls, present: Collection[int], window: int = -1) -> ChunkRow:
        """A row of any collection of chunk indices."""
        return cls(frozenset(present), window)

    def wanted(self, length: int) -> range:
        """Chunks that a prefix of `length` chunks reads from this row."""
        return range(max(0, length - self.window) if self.window > 0 else 0, length)

    def serves(self, length: int) -> bool:
        """True if this row can serve a prefix of `length` chunks."""
        return all(chunk in self.present for chunk in self.wanted(length))


@dataclasses.dataclass(frozen=True)
class LookupResult:
    """A prefix hit, in chunks, and per row the chunks that its retrieve will read; everything else is let go."""

    hit: int
    retained: tuple[tuple[int, ...], ...]


def servable_lengths(rows: Sequence[ChunkRow], num_chunks: int) -> list[int]:
    """Every length, in chunks, that every row serves. Not monotone: a shorter prefix may be unservable."""
    return [length for length in range(1, num_chunks + 1) if all(row.serves(length) for row in rows)]


def longest_prefix(rows: Sequence[ChunkRow], num_chunks: int) -> LookupResult:
    """The longest servable prefix of `num_chunks` chunks over all rows, of which there is at least one."""
    if not rows:
        raise OperationError("rows", 0, "at least one object group and rank")
    hit = max(servable_lengths(rows, num_chunks), default=0)
    return LookupResult(hit, tuple(tuple(row.wanted(hit)) for row in rows))


def recurrent_hit(pages: Sequence[Collection[int]]) -> int:
    """The longest length at which every recurrent group has a state: the largest common member, 0 for none.

    Per group, `pages` are lengths, in chunks, at the end of which its state is stored.
    """
    common = set(pages[0]).intersection(*pages[1:]) if pages else set()
    return max(common, default=0)
