"""The operations that `data_plane.py` times: what each moves, with which code, and how its result is verified."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from engine_kernels import POISON, LMCacheTransfer, VllmStep, has_lmcache, has_vllm, repeated, torch_for

from hkv import paged
from hkv.chunks.formats import TRAITS, EngineKVFormat
from hkv.chunks.kernel_groups import PageGeometry
from hkv.chunks.objects import Region
from hkv.chunks.transfer import Transfer, pack, pieces_of, unpack
from hkv.layout.block_layout import Layout
from hkv.layout.content import quantize
from hkv.paged import plan
from hkv.paged.implementations import choose
from hkv.paged.words import runs_of_pool
from hkv.spec import FullAttention, LayerSpec, MLAAttention

GPU_IMPLEMENTATIONS = ("xla", "mosaic", "pallas_triton", "triton")
SAMPLE = 64
"""Pages of a result that are compared with the host's."""


class Measurable(Protocol):
    """Something that can be verified once and then run again and again; `run` does the operation `repeated()` times."""

    def verify(self) -> None: ...
    def run(self) -> Any: ...
    def wait(self, result: Any) -> None: ...


@dataclasses.dataclass(frozen=True)
class Case:
    """One operation on one layout.

    Attributes:
      operation: gather, scatter, write, copy, step of so many tokens, pack or unpack.
      layout: physical order, or LMCache's format.
      dtype: what the elements are.
      page_bytes: bytes of one page of one layer.
      run_bytes: bytes of the shortest gapless piece that moves, as the operation is planned.
      bytes_moved: bytes read and bytes written by one call.
      makers: implementation name -> what makes the thing to measure.
    """

    operation: str
    layout: str
    dtype: str
    page_bytes: int
    run_bytes: int
    bytes_moved: int
    makers: Mapping[str, Callable[[], Measurable]]

    @property
    def name(self) -> str:
        """The case in words, for `--only`."""
        return f"{self.operation} {self.layout} {self.dtype} {self.page_bytes}"

    def candidates(self) -> Iterator[tuple[str, Callable[[], Measurable]]]:
        """Implementations and makers."""
        yield from self.makers.items()


def all_cases(nbytes: int) -> Iterator[Case]:
    """Every case; bulk ones move about `nbytes` out of a pool of twice as many, decode ones a step's tokens."""
    for tokens in DECODE_TOKENS:
        yield from _step_cases(tokens)
    for page in (4096, 32768, 262144):
        yield from _plain_cases(page, max(nbytes // page, 2))
    for geometry in GEOMETRIES:
        yield from _chunk_cases(geometry, nbytes)
    for label, spec, order in LAYOUTS:
        one_page = Layout.of_spec(spec, order, num_blocks=1, num_layers=NUM_LAYERS)
        page = sum(size for _, size in one_page.block_runs(0, 0))
        for operation in OPERATIONS:
            count = max(nbytes // page // layers_moved(operation), 2)
            layout = Layout.of_spec(spec, order, num_blocks=2 * count, num_layers=NUM_LAYERS)
            yield _paged_case(operation, label, order, layout, page, count)


OPERATIONS = ("gather", "scatter", "write", "copy", "copy, disjoint")
DECODE_TOKENS = (64, 256, 4096)
"""New tokens of one step, of all requests together."""

NUM_LAYERS = 2
DECODE_LAYERS = 32


def layers_moved(operation: str) -> int:
    """Layers of a layout that an operation moves."""
    return NUM_LAYERS if operation.startswith("copy") else 1


def _attention(block_size: int, dtype: str = "bfloat16") -> FullAttention:
    return FullAttention(block_size=block_size, num_kv_heads=8, head_size=128, dtype=dtype)


LAYOUTS: list[tuple[str, LayerSpec, str]] = [
    ("bfloat16", _attention(8), "LBNHC"),
    ("bfloat16", _attention(16), "LBNHC"),
    ("bfloat16", _attention(64), "LBNHC"),
    ("bfloat16", _attention(16), "BLNHC"),
    ("bfloat16", _attention(16), "LHBNC"),
    ("float8_e4m3fn", _attention(16, "float8_e4m3fn"), "LBNHC"),
    ("bfloat16 576", MLAAttention(block_size=64, head_size=576), "LBNHC"),
    ("fp8 656 bytes", quantize(MLAAttention(block_size=64, head_size=576), "fp8_ds_mla"), "LBNHC"),
    (
        "fp8 132 bytes",
        quantize(MLAAttention(block_size=64, head_size=128, dtype="uint8"), "fp8_indexer"),
        "LBNHC",
    ),
]
"""Content, spec and physical order. Tokens of the first four are rows of 4 KiB."""

GEOMETRIES = [
    PageGeometry(EngineKVFormat(1), 2, 4, 0, 16, 8, 128, "bfloat16"),
    PageGeometry(EngineKVFormat(3), 1, 4, 0, 64, 1, 576, "bfloat16"),
    PageGeometry(EngineKVFormat(14), 1, 4, 0, 64, 1, 132, "uint8"),
    PageGeometry(EngineKVFormat(12), 1, 4, 0, 16, 8, 256, "bfloat16"),
]
"""Chunk transfers: planes, latents, indexers, heads first. Blocks are filled in."""


def implementations() -> tuple[str, ...]:
    """Names that this device can run."""
    if jax.default_backend() != "gpu":
        return ("xla",)
    return GPU_IMPLEMENTATIONS


def in_one_dispatch(step: Callable[..., Any]) -> Callable[..., Any]:
    """`step(carry, shift, *arguments)` done `repeated()` times by one program, the carry in place; shifts end at 0.

    A step that shifts what it reads by `shift` cannot be taken out of the loop as one that is always the same.
    """

    def steps(carry: Any, *arguments: Any) -> Any:
        last = repeated() - 1
        return jax.lax.fori_loop(0, last + 1, lambda i, kept: step(kept, last - i, *arguments), carry)

    return jax.jit(steps, donate_argnums=0)


@jax.jit
def same_bits(found: Any, expected: Any) -> jax.Array:
    """True if two trees of arrays hold the same bits, compared where they are: bytes do not cross to the host."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return jnp.all(jnp.stack([jnp.all(bits_of(a) == bits_of(b)) for a, b in pairs]))


def bits_of(array: jax.Array) -> jax.Array:
    return array.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[array.dtype.itemsize])


def random_words(count: int, seed: int) -> jax.Array:
    return jax.random.bits(jax.random.key(seed), (count,), np.uint32)


@dataclasses.dataclass
class PagedOperation:
    """An operation of `hkv.paged`; the pool, or what is gathered, is handed from call to call."""

    operation: str
    layout: Layout
    count: int
    implementation: str

    def __post_init__(self) -> None:
        generator = np.random.default_rng(0)
        layout = self.layout
        words = -(-layout.end // 128) * 32
        self.pool = random_words(words, 1)
        ids = generator.permutation(layout.num_blocks).astype(np.int32)
        self.table, self.other = jnp.asarray(ids[: self.count]), jnp.asarray(ids[self.count : 2 * self.count])
        tokens = generator.permutation(self.count * layout.states_per_block).astype(np.int32)
        self.blocks = self.table[tokens // layout.states_per_block]
        self.states = jnp.asarray(tokens % layout.states_per_block)
        self.values: Any = None
        if self.operation in ("scatter", "write", "gather"):
            self.values, _ = paged.gather(random_words(words, 2), layout, jnp.int32(0), self.table, null_block=-1)
        self.steps = in_one_dispatch(self._step)
        self.gathered = self.values if self.operation == "gather" else None

    def _step(self, kept: Any, shift: Any, pool: Any, table: Any, other: Any, blocks: Any, states: Any) -> Any:
        chosen: Any = {"implementation": self.implementation}
        layout, layer = self.layout, jnp.int32(0)
        if self.operation == "gather":
            return paged.gather(pool, layout, layer, jnp.roll(table, shift), null_block=-1, **chosen)[0]
        if self.operation == "scatter":
            return paged.scatter(kept, layout, layer, table, pool, null_block=-1, **chosen)[0]
        if self.operation == "write":
            return paged.write(kept, layout, layer, blocks, states, pool, **chosen)[0]
        return paged.copy_blocks(kept, layout, table, other, disjoint=self.operation != "copy", **chosen)[0]

    def run(self) -> Any:
        tables = (self.table, self.other, self.blocks, self.states)
        if self.operation == "gather":
            self.gathered = self.steps(self.gathered, self.pool, *tables)
            return self.gathered
        self.pool = self.steps(self.pool, self.values, *tables)
        return self.pool

    def wait(self, result: Any) -> None:
        jax.block_until_ready(result)

    def verify(self) -> None:
        """Against XLA on the same words, which the tests hold to loops, and poison where nothing may be written."""
        plain = dataclasses.replace(self, implementation="xla")
        if self.operation == "gather":
            plain.pool = self.pool
            self.gathered = jax.tree.map(lambda a: jnp.full_like(a, 7), self.gathered)
            assert same_bits(self.run(), plain.run()), f"{self.implementation} moved other bytes than xla"
            return
        self.pool = jnp.full_like(self.pool, POISON * 0x01010101) ^ (self.pool & 1)
        before, plain.pool = jnp.copy(self.pool), jnp.copy(self.pool)
        found = self.run()
        assert same_bits(found, plain.run()), f"{self.implementation} moved other bytes than xla"
        changed = int(jnp.sum(found != before)) * 4
        assert 0 < changed <= self.count * self.page_bytes * layers_moved(self.operation)

    @property
    def page_bytes(self) -> int:
        return sum(size for _, size in self.layout.block_runs(0, 0))


def shortest_run(operation: str, layout: Layout) -> int:
    """Bytes of the shortest gapless piece that an operation moves: what it plans, not what a block could be."""
    pool = jax.ShapeDtypeStruct((-(-layout.end // 128) * 128,), np.uint8)
    parts = [plan.part_view(layout, part.name) for part in layout.content]
    views = {"write": [(view, plan.TOKEN) for view in parts], "copy": [(plan.whole_blocks(layout), 1)]}
    dtype, found = runs_of_pool(pool, views.get(operation.split(",")[0], [(view, plan.BLOCK) for view in parts]))
    return min(runs.length for runs in found) * dtype.itemsize


def _paged_case(operation: str, dtype: str, order: str, layout: Layout, page: int, count: int) -> Case:
    makers = {name: (lambda name=name: PagedOperation(operation, layout, count, name)) for name in implementations()}
    moved = 2 * page * count * layers_moved(operation)
    return Case(operation, order, dtype, page, shortest_run(operation, layout), moved, makers)


@dataclasses.dataclass
class DecodeStep:
    """The decode write: a step's tokens of all layers, in one launch of a kernel; one a block, as in decoding."""

    layout: Layout
    tokens: int
    implementation: str

    def __post_init__(self) -> None:
        layout, generator = self.layout, np.random.default_rng(0)
        self.pool = random_words(-(-layout.end // 128) * 32, 1)
        self.blocks = jnp.asarray(generator.permutation(layout.num_blocks)[: self.tokens].astype(np.int32))
        self.states = jnp.asarray(generator.integers(0, layout.states_per_block, self.tokens, dtype=np.int32))
        shape = (layout.num_layers, self.tokens, layout.shape[2])
        self.values = {
            part.name: jax.random.bits(jax.random.key(seed), (*shape, *part.shape), np.uint16).view(jnp.bfloat16)
            for seed, part in enumerate(layout.content)
        }

        self.steps = in_one_dispatch(self._step)

    def _step(self, pool: Any, shift: Any, blocks: Any, states: Any, values: Any) -> Any:
        del shift
        given = ((pool,), (self.layout,), (blocks,), (states,), (values,))
        return paged.write_step(*given, implementation=self.implementation)[0][0]

    def run(self) -> Any:
        self.pool = self.steps(self.pool, self.blocks, self.states, self.values)
        return self.pool

    def wait(self, result: Any) -> None:
        jax.block_until_ready(result)

    def verify(self) -> None:
        """Against XLA layer by layer, over poison."""
        self.pool = jnp.full_like(self.pool, POISON * 0x01010101)
        expected = jnp.array(self.pool)
        for layer in range(self.layout.num_layers):
            mine = {part: content[layer] for part, content in self.values.items()}
            expected, _ = paged.write(expected, self.layout, jnp.int32(layer), self.blocks, self.states, mine)
        before = jnp.array(self.pool)
        assert same_bits(self.run(), expected), f"{self.implementation} wrote other bytes than xla"
        assert not same_bits(self.pool, before)


def _step_cases(tokens: int) -> Iterator[Case]:
    """A model of 32 layers of eight heads; on a CPU of four, which is little enough to wait for."""
    layers = DECODE_LAYERS if jax.default_backend() == "gpu" else 4
    layout = Layout.of_spec(_attention(16), "LBNHC", num_blocks=tokens + 1, num_layers=layers)
    row = 2 * 8 * 128 * 2
    makers: dict[str, Callable[[], Measurable]] = {
        name: (lambda name=name: DecodeStep(layout, tokens, name)) for name in implementations()
    }
    if has_vllm():
        makers["vllm"] = lambda: VllmStep(layout, tokens)
    run = shortest_run("write", layout)
    yield Case(f"step of {tokens} tokens", "LBNHC", "bfloat16", 16 * row, run, 2 * tokens * layers * row, makers)


@dataclasses.dataclass
class PlainPages:
    """Pages of one contiguous array, `[pages, words]`: what JAX's indexing, PyTorch's, and the kernels alone do."""

    operation: str
    implementation: str
    page: int
    count: int

    def __post_init__(self) -> None:
        words = self.page // 4
        self.pool = random_words(2 * self.count * words, 1).reshape(2 * self.count, words)
        ids = np.random.default_rng(0).permutation(2 * self.count)[: self.count].astype(np.int32)
        self.ids, self.values = jnp.asarray(ids), None
        if self.operation == "scatter":
            self.values = random_words(self.count * words, 2).reshape(self.count, words)
        self._prepare()

    def _prepare(self) -> None:
        self.gathered = jnp.zeros_like(self.pool[: self.count])
        if self.implementation == "jnp":
            self.take = in_one_dispatch(
                lambda kept, shift, pool, ids: jnp.take(pool, jnp.roll(ids, shift), axis=0, mode="fill")
            )
            self.put = in_one_dispatch(lambda pool, shift, ids, values: pool.at[ids].set(values, mode="drop"))
            return
        code = choose(self.implementation)
        self.take = in_one_dispatch(
            lambda kept, shift, pool, ids: code.gather(pool, jnp.roll(ids, shift)[:, None], 1)[:, 0, 0]
        )
        self.put = in_one_dispatch(
            lambda pool, shift, ids, values: code.scatter(pool, ids[:, None], values[:, None, None])
        )

    def run(self) -> Any:
        if self.operation == "gather":
            self.gathered = self.take(self.gathered, self.pool, self.ids)
            return self.gathered
        self.pool = self.put(self.pool, self.ids, self.values)
        return self.pool

    def wait(self, result: Any) -> None:
        jax.block_until_ready(result)

    def verify(self) -> None:
        before, ids = np.asarray(self.pool), np.asarray(self.ids)
        found = np.asarray(self.run())
        sample = np.random.default_rng(1).integers(0, self.count, SAMPLE)
        if self.operation == "gather":
            assert np.array_equal(found[sample], before[ids[sample]])
            return
        assert np.array_equal(found[ids[sample]], np.asarray(self.values)[sample])
        others = np.setdiff1d(np.arange(2 * self.count), ids)[:SAMPLE]
        assert np.array_equal(found[others], before[others])


@dataclasses.dataclass
class TorchPages:
    """The same pages by PyTorch."""

    operation: str
    page: int
    count: int

    def __post_init__(self) -> None:
        self.torch = torch_for(jax.default_backend())
        where = "cuda" if jax.default_backend() == "gpu" else "cpu"
        words = self.page // 4
        generator = np.random.default_rng(0)

        def random(rows: int) -> Any:
            return self.torch.from_numpy(generator.integers(0, 2**31, (rows, words), dtype=np.int32)).to(where)

        self.pool, self.values = random(2 * self.count), random(self.count)
        self.ids = self.torch.from_numpy(generator.permutation(2 * self.count)[: self.count].copy()).to(where)

    def run(self) -> Any:
        found = None
        for _ in range(repeated()):
            if self.operation == "gather":
                found = self.torch.index_select(self.pool, 0, self.ids)
            else:
                found = self.pool.index_copy_(0, self.ids, self.values)
        return found

    def wait(self, result: Any) -> None:
        if result.is_cuda:
            self.torch.cuda.synchronize()

    def verify(self) -> None:
        found = self.run()
        expected = self.pool[self.ids] if self.operation == "gather" else self.values
        assert bool((expected == (found if self.operation == "gather" else found[self.ids])).all())


def _plain_cases(page: int, count: int) -> Iterator[Case]:
    for operation in ("gather", "scatter"):
        makers: dict[str, Callable[[], Measurable]] = {
            name: (lambda name=name, operation=operation: PlainPages(operation, name, page, count))
            for name in ("jnp", *implementations())
        }
        if torch_for(jax.default_backend()) is not None:
            makers["torch"] = lambda operation=operation: TorchPages(operation, page, count)
        yield Case(operation, "[pages, words]", "uint32", page, page, 2 * page * count, makers)


@dataclasses.dataclass
class ChunkTransfer:
    """A pack or unpack of one kernel group; four objects."""

    operation: str
    transfer: Transfer
    implementation: str

    def __post_init__(self) -> None:
        geometry, region = self.transfer.geometry, self.transfer.region
        shape = (geometry.pages_per_tensor, geometry.page_stride_bytes)
        keys = jax.random.split(jax.random.key(0), geometry.num_layers)
        self.tensors = tuple(jax.random.bits(key, shape, np.uint8) for key in keys)
        self.objects = jax.random.bits(jax.random.key(1), (4, region.nbytes), np.uint8)
        ids = np.random.default_rng(0).permutation(geometry.num_blocks)[: 4 * self.transfer.blocks_per_object]
        self.ids, self.skip = jnp.asarray(ids.astype(np.int32)), jnp.int32(0)

        self.steps = in_one_dispatch(self._step)

    def _step(self, kept: Any, shift: Any, other: Any, ids: Any, skip: Any) -> Any:
        tensors, objects = (other, kept) if self.operation == "pack" else (kept, other)
        del shift
        move = pack if self.operation == "pack" else unpack
        return move(self.transfer, tensors, objects, ids, skip, self.implementation)[0]

    def run(self) -> Any:
        if self.operation == "pack":
            self.objects = self.steps(self.objects, self.tensors, self.ids, self.skip)
            return self.objects
        self.tensors = self.steps(self.tensors, self.objects, self.ids, self.skip)
        return self.tensors

    def wait(self, result: Any) -> None:
        jax.block_until_ready(result)

    def verify(self) -> None:
        """Against XLA; objects that are packed are poisoned first."""
        self.objects = jnp.full_like(self.objects, POISON) if self.operation == "pack" else self.objects
        plain = dataclasses.replace(self, implementation="xla")
        plain.tensors, plain.objects = jax.tree.map(jnp.copy, (self.tensors, self.objects))
        before = jax.tree.map(jnp.copy, self.objects if self.operation == "pack" else self.tensors)
        found = self.run()
        assert same_bits(found, plain.run()), f"{self.implementation} moved other bytes than xla"
        assert not same_bits(found, before)


def _chunk_cases(geometry: PageGeometry, nbytes: int) -> Iterator[Case]:
    per_block = geometry.kv_size * geometry.num_layers * geometry.page_bytes
    per_object = max(nbytes // per_block // 4, 1)
    geometry = dataclasses.replace(geometry, num_blocks=8 * per_object)
    rows = per_object * geometry.slots
    shape = (geometry.kv_size, geometry.num_layers, rows, geometry.num_heads * geometry.head_size)
    size = math.prod(shape) * geometry.item_bytes
    transfer = Transfer(geometry, Region(0, 0, rows, shape, geometry.dtype, size))
    for operation in ("pack", "unpack"):
        makers: dict[str, Callable[[], Measurable]] = {
            name: (lambda name=name, operation=operation: ChunkTransfer(operation, transfer, name))
            for name in implementations()
        }
        if has_lmcache(geometry.format):
            makers["lmcache"] = lambda operation=operation: LMCacheTransfer(operation, transfer)
        label = f"format {int(geometry.format)}"
        moved = 2 * 4 * per_object * per_block
        assert TRAITS[geometry.format].kernel
        run = min(piece.length for piece in pieces_of(geometry))
        yield Case(operation, label, geometry.dtype, geometry.page_bytes, run, moved, makers)
