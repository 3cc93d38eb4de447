"""Chunks: what is stored, found, moved and loaded, by counting blocks, bytes and tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from hkv.chunks.formats import SCALE_BYTES, TRAITS, EngineKVFormat, num_tensors
from hkv.chunks.kernel_groups import EngineGroupInfo, KernelGroup, PageGeometry
from hkv.chunks.objects import StagingLayout, object_groups, object_layout
from hkv.chunks.plans import (
    ChunkRow,
    Launch,
    downsample,
    host_copy_pieces,
    longest_prefix,
    null_chunks,
    plan_transfer,
    recurrent_hit,
    retrieve_range,
    store_range,
)
from hkv.contract.traffic import Choices
from hkv.errors import OperationError
from reference.chunks.transfer import pack, runs, unpack
from tests.suites.suite import CaseSuite, case_check

POISON = 0xA5
FORMATS = tuple(format for format in EngineKVFormat if TRAITS[format].kernel and TRAITS[format].block_axis)


@dataclasses.dataclass(frozen=True)
class Store:
    """Kernel groups with their block ids, chunks of tokens, and which of them each object group has stored."""

    groups: tuple[KernelGroup, ...]
    chunk: int
    chunks: int
    separate: bool
    ids: tuple[tuple[int, ...], ...]
    present: tuple[frozenset[int], ...]
    numbers: tuple[int, ...]

    def per_chunk(self, member: int) -> int:
        """Blocks that one chunk covers in a kernel group."""
        return self.chunk // self.groups[member].tokens_per_block

    def kept(self, member: int) -> int:
        """Blocks of a chunk that an object holds: those of the last tokens that the window reaches."""
        window = self.groups[member].info.window
        tokens = self.chunk if window == -1 else min(self.chunk, window)
        return tokens // self.groups[member].tokens_per_block

    def tail(self, member: int, chunk: int) -> list[int]:
        """Block ids that an object of that chunk holds."""
        count = self.per_chunk(member)
        return list(self.ids[member][chunk * count : (chunk + 1) * count])[count - self.kept(member) :]

    def __str__(self) -> str:
        shapes = [
            f"{group.geometry.format.name} {group.geometry.slots} slots, {group.tokens_per_block} tokens, "
            f"window {group.info.window}"
            for group in self.groups
        ]
        return (
            f"{shapes}, {self.chunks} chunks of {self.chunk} tokens, objects {'apart' if self.separate else 'together'}"
        )


def draw_store(choices: Choices) -> Store:
    """A random case."""
    blocks = choices.integer(1, 6)
    base = choices.pick((2, 4))
    chunk = base * choices.pick((2, 4))
    groups = tuple(_draw_group(choices, base, chunk, blocks, index) for index in range(choices.integer(1, 3)))
    chunks = choices.integer(1, 4)
    ids = tuple(
        tuple(choices.integer(0, blocks - 1) for _ in range(chunks * chunk // group.tokens_per_block))
        for group in groups
    )
    present = tuple(frozenset(c for c in range(chunks) if choices.chance(75)) for _ in range(3))
    return Store(
        groups, chunk, chunks, choices.chance(60), ids, present, tuple(choices.integer(0, 40) for _ in range(6))
    )


def _draw_group(choices: Choices, base: int, chunk: int, blocks: int, index: int) -> KernelGroup:
    found = choices.pick(FORMATS)
    traits = TRAITS[found]
    heads, size, dtype = choices.integer(1, 3), choices.pick((2, 4, 6, 18, 66)), "bfloat16"
    if found is EngineKVFormat.NL_X_NB_BSV_BSS:
        heads, size, dtype = 1, 12 + SCALE_BYTES, "uint8"
    if traits.mla:
        heads = 1
    ratio = choices.pick((1, 1, 2))
    slots = base // ratio
    layers = choices.integer(1, 2)
    stride = slots * heads * size + 10 if traits.padded_blocks and choices.chance(50) else 0
    geometry = PageGeometry(found, traits.kv_size, layers, blocks, slots, heads, size, dtype, stride)
    window = choices.pick((-1, -1, base, chunk, 2 * chunk))
    return KernelGroup(tuple(range(layers)), geometry, EngineGroupInfo(index, tuple(range(layers)), base, window))


@case_check("regions of an object", "B-I27")
def regions(case: Store) -> Iterator[str]:
    """Regions lie side by side without overlap, as long as the blocks they hold, and slots follow one another."""
    objects = object_groups(case.groups, case.chunk, case.separate)
    if sorted(member for group in objects for member in group.members) != list(range(len(case.groups))):
        yield f"kernel groups {[group.members for group in objects]} are not each in one object"
    for group in objects:
        windows = {case.groups[member].info.window for member in group.members}
        chunks = {-1 if window == -1 else -(-window // case.chunk) for window in windows}
        if case.separate and chunks != {group.window}:
            yield f"an object that is read {group.window} chunks back holds groups of windows {windows}"
    layouts = [object_layout(case.groups, group, case.chunk) for group in objects]
    for group, layout in zip(objects, layouts, strict=True):
        end = 0
        for member, region in zip(group.members, layout.regions, strict=True):
            geometry = case.groups[member].geometry
            slots = case.kept(member) * geometry.slots
            wanted = geometry.kv_size * geometry.num_layers * slots * geometry.row_bytes
            if (region.offset, region.slots, region.nbytes) != (end, slots, wanted):
                yield f"region {member} has {region.nbytes} bytes at {region.offset}, not {wanted} at {end}"
            end += wanted
        if layout.nbytes != end:
            yield f"an object of {layout.nbytes} bytes holds regions of {end}"
    staging = StagingLayout(tuple(layouts), 2)
    starts = [staging.offset(slot, index) for slot in range(2) for index in range(len(layouts))]
    sizes = [layout.nbytes for _ in range(2) for layout in layouts]
    if starts != [sum(sizes[:index]) for index in range(len(sizes))] or staging.nbytes != sum(sizes):
        yield f"staged objects start at {starts}, with {sizes} bytes each"


@case_check("addresses of a transfer", "B-I27", "B-I18")
def addresses(case: Store) -> Iterator[str]:
    """The runs of a block's transfer fill its place in the object once, and touch each byte of its pages once."""
    for member, group in enumerate(case.groups):
        geometry = group.geometry
        layout = object_layout(case.groups, object_groups(case.groups, case.chunk)[0], case.chunk)
        region = layout.region(member)
        limit = geometry.pages_per_tensor * geometry.page_stride_bytes
        read: set[tuple[int, int]] = set()
        for block in range(geometry.num_blocks):
            written: list[int] = []
            for tensor, page, start, length in runs(geometry, region, 0, block):
                written += range(start, start + length)
                touched = {(tensor, byte) for byte in range(page, page + length)}
                inside = page % geometry.page_stride_bytes + length <= geometry.page_bytes
                if touched & read or not 0 <= page <= limit - length or not inside:
                    yield f"block {block} of group {member} shares bytes of tensor {tensor} with others, or leaves it"
                read |= touched
            own = geometry.kv_size * geometry.num_layers * geometry.page_bytes
            held = region.offset <= min(written) and max(written) < region.offset + region.nbytes
            if len(set(written)) != own or len(written) != own or not held:
                yield f"block {block} of group {member} fills {len(set(written))} bytes of its region, not {own}"


@case_check("stored is loaded", "B-I27", "B-I31")
def round_trip(case: Store) -> Iterator[str]:
    """Pages packed from one set of blocks are unpacked into another, and nothing else is touched."""
    group = case.groups[0]
    geometry, random = group.geometry, np.random.default_rng(case.numbers[0])
    layout = object_layout(case.groups, object_groups(case.groups, case.chunk)[0], case.chunk)
    region = layout.region(0)
    count = num_tensors(TRAITS[geometry.format].structure, geometry.num_layers)
    shape = (geometry.pages_per_tensor, geometry.page_stride_bytes)
    tensors = [random.integers(0, 160, shape, dtype=np.uint8) for _ in range(count)]
    per_object = region.slots // geometry.slots
    sources = list(dict.fromkeys(case.ids[0]))[:per_object]
    ids = sources + [-1] * (per_object - len(sources))
    objects = np.full((1, layout.nbytes + 3), POISON, np.uint8)
    dropped = pack(geometry, region, tensors, objects, ids)
    if dropped != len(ids) - len(sources):
        yield f"{dropped} of {ids} are dropped"
    if (objects[0, : region.offset] != POISON).any() or (objects[0, region.offset + region.nbytes :] != POISON).any():
        yield "packing wrote outside of the region"
    targets = [(block + 1) % geometry.num_blocks for block in ids[: len(sources)]] + [-1] * (len(ids) - len(sources))
    made = [np.full_like(tensor, POISON) for tensor in tensors]
    unpack(geometry, region, made, objects, targets)
    for position, (source, target) in enumerate(zip(sources, targets, strict=False)):
        pairs = zip(runs(geometry, region, position, source), runs(geometry, region, position, target), strict=True)
        for (tensor, read, _, length), (other, written, _, _) in pairs:
            old, new = tensors[tensor].reshape(-1), made[other].reshape(-1)
            if not np.array_equal(old[read : read + length], new[written : written + length]):
                yield f"block {source} comes back as block {target} with other bytes"
                return
    bytes_made = sum(int((tensor != POISON).sum()) for tensor in made)
    most = len(sources) * geometry.kv_size * geometry.num_layers * geometry.page_bytes
    if bytes_made != most:
        yield f"{bytes_made} bytes were loaded for {most} of {len(sources)} blocks"


@case_check("launches of a transfer", "B-I27", "B-I4")
def launches(case: Store) -> Iterator[str]:
    """A store moves each present chunk's kept blocks once; a retrieve those of the window, less what is skipped."""
    for index, group in enumerate(object_groups(case.groups, case.chunk, case.separate)):
        present = [chunk in case.present[index] for chunk in range(case.chunks)]
        made = plan_transfer(case.groups, group, case.ids, case.chunk, "store", present)
        moved = [(launch.group, chunk) for launch in made for chunk in launch.objects]
        if sorted(moved) != sorted(
            (member, chunk) for member in group.members for chunk in range(case.chunks) if present[chunk]
        ):
            yield f"a store of the chunks {present} moves {moved}"
        yield from _ids(case, made)
        first = max(0, case.chunks - group.window) if group.window >= 1 else 0
        skip = case.numbers[1] % (case.chunks * case.chunk)
        try:
            made = plan_transfer(case.groups, group, case.ids, case.chunk, "retrieve", present, skip)
        except OperationError:
            if all(present[first:]):
                yield f"a retrieve of the chunks from {first} on is refused, though {present} are there"
            continue
        yield from _ids(case, made)
        for member in group.members:
            tokens = case.groups[member].tokens_per_block
            moved = [chunk for launch in made if launch.group == member for chunk in launch.objects]
            wanted = list(range(first, case.chunks))
            needed = [chunk for chunk in wanted if (chunk + 1) * case.chunk > skip]
            if not set(needed) <= set(moved) or not set(moved) <= set(wanted) or not all(present[c] for c in needed):
                yield f"a retrieve from chunk {first} on, {skip} tokens skipped, moves {moved} of {present}"
            for launch in made:
                if launch.group != member:
                    continue
                start = launch.objects[0] * case.chunk
                own = max(0, skip - start) // tokens
                count, kept = case.per_chunk(member), case.kept(member)
                in_tail = sum(1 for block in range(own) if block % count >= count - kept)
                if launch.skip != in_tail:
                    yield f"{launch.skip} blocks of {launch.block_ids} are skipped, not {in_tail}"


def _ids(case: Store, made: list[Launch]) -> Iterator[str]:
    for launch in made:
        wanted = [block for chunk in launch.objects for block in case.tail(launch.group, chunk)]
        if list(launch.block_ids) != wanted:
            yield f"chunks {launch.objects} of group {launch.group} move the blocks {launch.block_ids}, not {wanted}"


@case_check("null chunks", "B-I4", "B-I27")
def nulls(case: Store) -> Iterator[str]:
    """A chunk is left out exactly when every block that its object would hold is the null block."""
    for group in object_groups(case.groups, case.chunk, case.separate):
        found = null_chunks(case.groups, group, case.ids, case.chunk)
        wanted = [
            all(block == 0 for member in group.members for block in case.tail(member, chunk))
            for chunk in range(case.chunks)
        ]
        if found != wanted:
            yield f"chunks are null: {found}, but {wanted} by their blocks"
        for member in group.members:
            kept = downsample(case.ids[member], case.per_chunk(member), case.kept(member))
            if kept != [block for chunk in range(case.chunks) for block in case.tail(member, chunk)]:
                yield f"of {case.ids[member]} the blocks {kept} are kept"


@case_check("joint lookup", "B-I8", "B-I9", "B-I28")
def joint_lookup(case: Store) -> Iterator[str]:
    """The hit is the longest length at which every row has all that a reader at that length needs; no more is held."""
    windows = [(-1, 1, 2, 0)[number % 4] for number in case.numbers]
    rows = [ChunkRow(present, window) for present, window in zip(case.present, windows, strict=False)]
    best, held = 0, [() for _ in rows]
    for length in range(case.chunks + 1):
        reads = [range(length - window if 0 < window < length else 0, length) for window in windows[: len(rows)]]
        if all(chunk in row.present for row, wanted in zip(rows, reads, strict=True) for chunk in wanted):
            best, held = length, [tuple(wanted) for wanted in reads]
    found = longest_prefix(rows, case.chunks)
    if found.hit != best or list(found.retained) != held:
        yield f"{found.hit} chunks are found and {found.retained} held, of {case.present} with windows {windows}"
    pages = [set(present) for present in case.present]
    common = max((length for length in range(40) if all(length in page for page in pages)), default=0)
    if recurrent_hit(pages) != common:
        yield f"recurrent groups resume at {recurrent_hit(pages)}, all have a state at {common}"


@case_check("host copies", "B-I37", "B-I27")
def host_copies(case: Store) -> Iterator[str]:
    """The pieces of a host copy make up the whole, and none crosses a page-locked span."""
    alignment = 1 << case.numbers[2] % 5
    position = case.numbers[3]
    pieces = host_copy_pieces(position, case.numbers[4], alignment)
    if sum(pieces) != case.numbers[4] or any(piece < 1 for piece in pieces):
        yield f"{case.numbers[4]} bytes in pieces of {pieces}"
    for piece in pieces:
        if position // alignment != (position + piece - 1) // alignment:
            yield f"a piece of {piece} bytes at {position} crosses a span of {alignment}"
        position += piece
    for group in case.groups:
        size, width = group.geometry.head_bytes, group.geometry.vector_bytes
        if size % width or any(size % wider == 0 for wider in (16, 4, 2) if wider > width and _any_width(group)):
            yield f"{width} bytes at once for heads of {size}"


def _any_width(group: KernelGroup) -> bool:
    return group.geometry.format is not EngineKVFormat.NL_X_NB_BSV_BSS


@case_check("ranges of tokens", "B-I27", "B-I31")
def ranges(case: Store) -> Iterator[str]:
    """Only whole chunks of computed tokens are stored; a load leaves one token to compute and covers the rest."""
    tokens, computed, stored = case.numbers[0] + 1, case.numbers[1], case.numbers[2] // case.chunk * case.chunk
    covered = [case.numbers[3], case.numbers[4]]
    start, end = store_range(tokens, covered, computed, stored, case.chunk, case.numbers[5])
    most = min(tokens, computed, case.numbers[5], *covered)
    if start != stored or end % case.chunk or (end > start and not most - case.chunk < end <= most) or end < start:
        yield f"tokens {start} to {end} are stored, of {most} that are there and {stored} stored before"
    prompt = case.numbers[0] + 1
    hit, stored_hit = case.numbers[1] % prompt, min(prompt, case.numbers[2] // case.chunk * case.chunk)
    start, end, skip = retrieve_range(hit, stored_hit, prompt, case.chunk, 2)
    have = hit - hit % 2
    if start % case.chunk or start + skip != have or not 0 <= skip < case.chunk:
        yield f"a load starts at {start} and skips {skip}, with {have} tokens there"
    if end > prompt - 1 or end < stored_hit - 1:
        yield f"a load of {stored_hit} stored tokens ends at {end} of {prompt}"


@case_check("blocks of tokens", "B-I16")
def blocks_of_tokens(case: Store) -> Iterator[str]:
    """Tokens, slots and blocks of a compressed group are converted by its own ratio."""
    for group in case.groups:
        per_block = group.tokens_per_block
        for tokens in range(0, 3 * per_block + 1):
            if group.num_blocks(tokens) != tokens // per_block:
                yield f"{tokens} tokens are {group.num_blocks(tokens)} blocks of {per_block}"
            if tokens % per_block == 0 and group.num_slots(tokens) != tokens // per_block * group.geometry.slots:
                yield f"{tokens} tokens are {group.num_slots(tokens)} slots"


SUITE = CaseSuite(
    "transfers",
    "chunk objects, transfer plans and lookups of an external store",
    draw_store,
    (blocks_of_tokens, regions, addresses, round_trip, launches, nulls, joint_lookup, host_copies, ranges),
    pace=3,
)
