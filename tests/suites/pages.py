"""Pages: where bytes lie, and whether writing, reading, copying and zeroing agree about it."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator

import numpy as np

from hkv.contract.traffic import Choices
from hkv.errors import LayoutError
from hkv.layout.block_layout import Layout, copy_width
from hkv.layout.content import quantize
from hkv.layout.orders import Order
from hkv.spec import FullAttention, LayerSpec, Mamba, MLAAttention
from hkv.spec.dtypes import item_bytes
from reference.paged.operations import copy_blocks, gather, scatter, write, zero_blocks
from tests.suites.suite import CaseSuite, case_check

POISON = 0xEE


@dataclasses.dataclass(frozen=True)
class Pages:
    """A layout and a few numbers to use it with; `repaged` are the states of pages that a compressed cache is cut into
    once more, or 0.
    """

    spec: LayerSpec
    layout: Layout
    seed: int
    repaged: int = 0

    def pool(self) -> np.ndarray:
        """A buffer full of poison, a little longer than the layout needs."""
        return np.full(self.layout.end + 7, POISON, np.uint8)

    @functools.cached_property
    def cells(self) -> dict[tuple[int, int], list[int]]:
        """First byte of every (head, state) cell of every (layer, block), address by address."""
        layout = self.layout
        return {
            (layer, block): [
                layout.address(layer, block, head, state)
                for head in range(layout.shape[2])
                for state in range(layout.states_per_block)
            ]
            for layer in range(layout.num_layers)
            for block in range(layout.num_blocks)
        }

    def bytes_in_order(self, layer: int, block: int) -> list[int]:
        """Every byte of one block of one layer, cell by cell."""
        content = self.layout.shape[4]
        return [byte for cell in self.cells[layer, block] for byte in range(cell, cell + content)]

    def bytes_of(self, layer: int, block: int) -> set[int]:
        """Every byte of one block of one layer."""
        return set(self.bytes_in_order(layer, block))

    def __str__(self) -> str:
        layout = self.layout
        return f"{self.spec} as {layout.order.value}, shape {layout.shape}, split {layout.split}"


def draw_pages(choices: Choices) -> Pages:
    """A small layout of any kind, order, padding and split that is legal."""
    for _ in range(30):
        try:
            return _draw(choices)
        except LayoutError:
            continue
    spec = FullAttention(block_size=2, num_kv_heads=3, head_size=2, head_size_v=1)
    return Pages(spec, Layout.of_spec(spec, Order.LBNHC, num_blocks=3, num_layers=2), 0)


def _draw(choices: Choices) -> Pages:
    spec = _draw_spec(choices)
    split = None
    if not spec.snapshot and choices.chance(50):
        split = choices.pick([size for size in range(1, spec.block_size + 1) if spec.block_size % size == 0])
    layout = Layout.of_spec(
        spec,
        choices.pick(list(Order)),
        num_blocks=choices.integer(1, 3),
        num_layers=choices.integer(1, 2),
        offset=choices.pick((0, 0, 16)),
        kernel_block_size=split,
    )
    states = 0
    if layout.tokens_per_state is not None and layout.tokens_per_state > 1 and choices.chance(60):
        states = choices.pick([n for n in range(1, layout.shape[3] + 1) if layout.shape[3] % n == 0])
        layout = layout.repaged(states)
    return Pages(spec, layout, choices.integer(0, 99), states)


def _draw_spec(choices: Choices) -> LayerSpec:
    kind = choices.pick(("attention", "attention", "packed", "latent", "compressed", "state"))
    block = choices.pick((2, 4, 6))
    padding = choices.pick((None, None, 8, 40))
    if kind == "state":
        spec = Mamba(block_size=block, shapes=((3,), (2, 2)), dtypes=("float32", "bfloat16"))
        return spec if padding is None else dataclasses.replace(spec, page_size_padded=spec.page_size_bytes + padding)
    if kind == "latent":
        return MLAAttention(block_size=block, head_size=choices.integer(1, 5), alignment=choices.pick((None, 64)))
    if kind == "compressed":
        size = block * 2
        return MLAAttention(
            block_size=size, head_size=4, tokens_per_state=2, block_stride_alignment=choices.pick((None, 64))
        )
    heads = choices.integer(1, 3)
    plain = FullAttention(
        block_size=block, num_kv_heads=heads, head_size=choices.integer(1, 4), head_size_v=choices.integer(1, 3)
    )
    if kind == "packed":
        name = choices.pick(("int8_per_token_head", "nvfp4", "kv_planes", "kv_halves"))
        plain = dataclasses.replace(plain, block_size=2, num_kv_heads=min(heads, 2), head_size=16, head_size_v=16)
        return (
            quantize(plain, name)
            if name != "kv_halves"
            else dataclasses.replace(plain, head_size=2, head_size_v=3, quantization=name)
        )
    if padding is not None:
        return dataclasses.replace(plain, page_size_padded=plain.page_size_bytes + padding)
    return plain


@case_check("injectivity", "B-I18")
def injectivity(case: Pages) -> Iterator[str]:
    """No two bytes of any layer, block, head and state share an address; all lie inside the buffer."""
    layout, owners = case.layout, {}
    for layer in range(layout.num_layers):
        for block in range(layout.num_blocks):
            for address in case.bytes_of(layer, block):
                if not layout.offset <= address < layout.end:
                    yield f"block {block} of layer {layer} reaches byte {address} of {layout.offset} to {layout.end}"
                if address in owners:
                    yield f"byte {address} belongs to {owners[address]} and to {(layer, block)}"
                owners[address] = (layer, block)
    if len(owners) != layout.num_layers * layout.num_blocks * _payload(case):
        yield f"{len(owners)} bytes for {layout.num_layers} layers and {layout.num_blocks} blocks of {_payload(case)}"


def _payload(case: Pages) -> int:
    return case.spec.unpadded_page_size_bytes if not hasattr(case.spec, "alignment") else _cells(case)


def _cells(case: Pages) -> int:
    return case.spec.num_heads * case.spec.num_states * case.spec.content_bytes


@case_check("pages apart", "B-I18", "B-I21")
def pages_apart(case: Pages) -> Iterator[str]:
    """Blocks of a layer are at least a page apart where a page is one run: padding is room that nobody else gets."""
    layout = case.layout
    if not layout.order.block_compact:
        return
    starts = sorted(
        layout.address(layer, block, 0, 0) for layer in range(layout.num_layers) for block in range(layout.num_blocks)
    )
    for first, second in itertools.pairwise(starts):
        if second - first < case.spec.page_size_bytes:
            yield f"pages of {case.spec.page_size_bytes} bytes start at {first} and {second}"


@case_check("inverse address", "B-I18")
def inverse(case: Pages) -> Iterator[str]:
    """Addresses and places are inverse to each other; padding belongs to nobody."""
    layout = case.layout
    known: dict[int, tuple[int, ...]] = {}
    for (layer, block), cells in case.cells.items():
        for number, cell in enumerate(cells):
            head, state = divmod(number, layout.states_per_block)
            known |= {cell + byte: (layer, block, head, state, byte) for byte in range(layout.shape[4])}
            last = layout.shape[4] - 1
            if layout.address(layer, block, head, state, last) != cell + last:
                yield f"the bytes of head {head}, state {state} of block {block} are not one run"
    near = {address + step for cells in case.cells.values() for address in cells for step in (-1, 0, layout.shape[4])}
    for address in sorted(near):
        place = layout.locate(address)
        found = None if place is None else (place.layer, place.block, place.head, place.state, place.byte)
        if found != known.get(address):
            yield f"byte {address} is said to be {found}, and is {known.get(address)}"


@case_check("views agree", "B-I19", "B-I20")
def views(case: Pages) -> Iterator[str]:
    """Shape, strides and descriptor name one address: by manager block, by kernel row, by part and by element."""
    layout = case.layout
    for layer in range(layout.num_layers):
        whole = layout.layer_view(layer)
        item = item_bytes(layout.dtype)
        for block in range(layout.num_blocks):
            for state in range(layout.states_per_block):
                row, inside = layout.kernel_rows(block)[state // layout.shape[3]], state % layout.shape[3]
                for head in range(layout.shape[2]):
                    if whole.address(row, head, inside, 0) != layout.address(layer, block, head, state):
                        yield f"layer {layer}, block {block}, state {state}, head {head}: the view says another byte"
                    last = layout.shape[4] // item - 1
                    if whole.address(row, head, inside, last) != layout.address(layer, block, head, state, last * item):
                        yield f"layer {layer}, block {block}, state {state}: the last element is elsewhere"
                yield from _part_views(case, layer, block, state, row, inside)


def _part_views(case: Pages, layer: int, block: int, state: int, row: int, inside: int) -> Iterator[str]:
    layout = case.layout
    for part in layout.content:
        try:
            view = layout.part_view(part.name, layer)
        except LayoutError:
            continue
        zero = (0,) * len(part.shape)
        for head in range(view.shape[1]):
            if view.address(row, head, inside, *zero) != layout.element_address(
                part.name, layer, block, head, state, *zero
            ):
                yield f"{part.name} of block {block}, state {state}, head {head}: view and element differ"


@case_check("parts disjoint", "B-I18")
def parts(case: Pages) -> Iterator[str]:
    """Keys, values, scales and states of a block share no byte, and lie inside the block."""
    layout, block = case.layout, case.layout.num_blocks - 1
    layer = layout.num_layers - 1
    inside, taken = case.bytes_of(layer, block), {}
    for part in layout.content:
        try:
            view = layout.part_view(part.name, layer)
        except LayoutError:
            return
        for head in range(view.shape[1]):
            for state in range(layout.states_per_block):
                for index in _corners(part.shape):
                    start = layout.element_address(part.name, layer, block, head, state, *index)
                    for byte in (start, start + item_bytes(part.dtype) - 1) if item_bytes(part.dtype) > 1 else (start,):
                        if byte in taken or byte not in inside:
                            yield f"byte {byte} of {part.name} is {taken.get(byte, 'outside of the block')}"
                        taken[byte] = part.name
                    place = layout.locate_element(start)
                    wanted = (part.name, layer, block, head, state, index)
                    if (
                        place is None
                        or (place.part, place.layer, place.block, place.head, place.state, place.index) != wanted
                    ):
                        yield f"the element {wanted} is said to be {place}"


def _corners(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """All elements of small parts; of larger ones the first and the last."""
    if math.prod(shape) <= 6:
        return [tuple(map(int, index)) for index in np.ndindex(*shape)]
    return [(0,) * len(shape), tuple(extent - 1 for extent in shape)]


@case_check("runs of a block", "B-I27", "B-I17")
def block_runs(case: Pages) -> Iterator[str]:
    """The runs that a copy or a zeroing visits are exactly the bytes of the block that carry data."""
    layout = case.layout
    for layer in range(layout.num_layers):
        for block in range(layout.num_blocks):
            visited = [
                byte for start, length in layout.block_runs(layer, block) for byte in range(start, start + length)
            ]
            if len(visited) != len(set(visited)) or set(visited) != case.bytes_of(layer, block):
                yield f"the runs of block {block} of layer {layer} are not its {len(case.bytes_of(layer, block))} bytes"


@case_check("states of a token", "B-I16")
def states_of_token(case: Pages) -> Iterator[str]:
    """Every token of a block has its state inside the block, and every state is some token's, in order."""
    layout = case.layout
    if layout.tokens_per_state is None:
        return
    found = [state for token in range(case.spec.block_size) for state in layout.states_of(token)]
    if sorted(set(found)) != list(range(layout.states_per_block)) or found != sorted(found):
        yield f"{case.spec.block_size} tokens lie in the states {found} of {layout.states_per_block}"


@case_check("writer is reader", "B-I18", "B-I17")
def round_trip(case: Pages) -> Iterator[str]:
    """Values written to slots are gathered from their block; nothing else changes, poison included."""
    layout, random = case.layout, np.random.default_rng(case.seed)
    pool, layer, block = case.pool(), layout.num_layers - 1, layout.num_blocks - 1
    if _has_planes_in_a_scattered_page(layout):
        return
    dtypes = {part.name: np.dtype(f"u{item_bytes(part.dtype)}") for part in layout.content}
    states = layout.states_per_block
    values = {}
    for part in layout.content:
        heads = layout.shape[2] if part.heads is None else part.heads
        shape = (states, heads, *part.shape)
        values[part.name] = random.integers(0, 200, shape).astype(dtypes[part.name])
    table = [block, -1, 0 if block else -1, layout.num_blocks]
    dropped = write(
        pool, layout, layer, [block] * states + [-1, layout.num_blocks], [*range(states), 0, 0], _longer(values)
    )
    if dropped != 1:
        yield f"{dropped} slots are dropped, one does not exist"
    outside = sorted(set(np.flatnonzero(pool != POISON).tolist()) - case.bytes_of(layer, block))
    if outside:
        yield f"writing block {block} of layer {layer} changed the bytes {outside[:4]}"
    null = 0 if block else -1
    found, missing = gather(pool, layout, layer, table, dtypes, null_block=null)
    for name, content in values.items():
        if not np.array_equal(found[name][:states], content):
            yield f"{name} of block {block} reads other bytes than were written"
        if found[name][states:].any():
            yield f"{name} of no block, the null block or a missing one is not zero"
    if missing != 1:
        yield f"{missing} blocks of a table are missing, one does not exist"
    other = case.pool()
    scatter(other, layout, layer, [block], values, null_block=null)
    if not np.array_equal(other, pool):
        yield "scattering a block writes other bytes than writing its slots"


def _longer(values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: np.concatenate([content, content[:1], content[:1]]) for name, content in values.items()}


def _has_planes_in_a_scattered_page(layout: Layout) -> bool:
    try:
        for part in layout.content:
            layout.part_view(part.name, 0)
    except LayoutError:
        return True
    return False


@case_check("copy and zero", "B-I31", "B-I17")
def copy_and_zero(case: Pages) -> Iterator[str]:
    """A copy takes every plane of every layer, as they were before the launch; a zeroing no byte of another block."""
    layout, random = case.layout, np.random.default_rng(case.seed)
    if layout.num_blocks < 3:
        return
    pool = random.integers(1, 200, layout.end + 7).astype(np.uint8)
    before = pool.copy()
    last = layout.num_blocks - 1
    dropped = copy_blocks(pool, layout, [0, 1, -1, layout.num_blocks], [1, last, 0, 0])
    if dropped != 1:
        yield f"{dropped} pairs are dropped, one names a block that does not exist"
    changed = set()
    for layer in range(layout.num_layers):
        for source, target in ((0, 1), (1, last)):
            reads, writes = (case.bytes_in_order(layer, block) for block in (source, target))
            changed |= set(writes)
            if not np.array_equal(pool[writes], before[reads]):
                yield f"block {target} of layer {layer} is no copy of what block {source} was"
    rest = np.array([byte for byte in range(len(pool)) if byte not in changed], int)
    if not np.array_equal(pool[rest], before[rest]):
        yield "a copy changed bytes outside of its targets"
    zeroed = before.copy()
    zero_blocks(zeroed, layout, [1, -1])
    own = {byte for layer in range(layout.num_layers) for byte in case.bytes_of(layer, 1)}
    for byte in range(len(zeroed)):
        if (zeroed[byte] == 0) != (byte in own):
            yield f"byte {byte} is {'zeroed' if zeroed[byte] == 0 else 'left'} by zeroing block 1"
            return


@case_check("copy width", "B-I37")
def widths(case: Pages) -> Iterator[str]:
    """The width of a copy divides address, stride and length; no wider one of 16, 8, 4, 2, 1 does."""
    for start, length in case.layout.block_runs(0, 0):
        for address in (start, start + case.seed):
            width = copy_width(address, length, case.layout.strides[1])
            wider = [
                w
                for w in (16, 8, 4, 2, 1)
                if w > width and not any(q % w for q in (address, length, case.layout.strides[1]))
            ]
            if address % width or length % width or case.layout.strides[1] % width or wider:
                yield f"{width} bytes at once for {length} bytes at {address}"


SUITE = CaseSuite(
    "pages",
    "layouts, views and page operations of small pools",
    draw_pages,
    (injectivity, pages_apart, inverse, views, parts, block_runs, states_of_token, round_trip, copy_and_zero, widths),
    pace=1,
)
