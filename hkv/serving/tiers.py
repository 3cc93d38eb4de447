"""Pages of computed prefixes out to chunk objects in a tier, and back into a cache, where `arrive` finds them."""

# jax.numpy types some of its own arguments as unknown.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from hkv.cache.arrivals import look_up, prefix_keys
from hkv.cache.cache import Cache
from hkv.cache.insertion import insert
from hkv.cache.state import PAD, StepRequest
from hkv.chunks.plans import RETRIEVE_BATCH, ChunkRow, batches, longest_prefix
from hkv.dialects.vllm.offload.config import OffloadConfig
from hkv.dialects.vllm.rules.parameters import CacheField, GroupField
from hkv.errors import ConfigError, OperationError
from hkv.keys.blake3 import ObjectKey, chunk_keys, kv_rank
from hkv.keys.fingerprint import ROOT
from hkv.layout.views.numpy import numpy_dtype
from hkv.paged import operations as paged
from hkv.serving import marks
from hkv.serving.block_objects import block_objects, longest_load, offered
from hkv.serving.marks import Marks
from hkv.serving.objects import ChunkObjects, Entry, Member, chunk_objects
from hkv.serving.serving import Serving
from hkv.state.status import Status
from hkv.tier.disk import StoredObject
from hkv.typed_jit import Ids, typed_jit

Array = Any
"""A JAX or a NumPy array."""

Blocks = Mapping[tuple[int, int], int]
"""The block of each group's entry of a row, whose number is negative."""


class ObjectTier(Protocol):
    """A place for flat objects of bytes by key: `hkv.tier.tier.MemoryTier`, `hkv.tier.disk.DiskTier`."""

    def __contains__(self, key: bytes, /) -> bool: ...

    def store(self, key: bytes, data: np.ndarray, /) -> bool:
        """Keeps uint8 `[bytes]`; False if it has no room."""
        ...

    def retrieve(self, key: bytes, /) -> Any:
        """The bytes, or an object with them as `data`; None when absent."""
        ...


@dataclasses.dataclass(frozen=True)
class Offload:
    """A tier, and the names of a served cache's objects in it.

    Attributes:
      tier: the tier.
      model: name of the model and its weights, without `@`: other weights compute other pages.
      chunk: tokens of a chunk, a multiple of every group's block; None for the fewest.
      rank: `hkv.keys.blake3.kv_rank` of the rank whose heads are in the pool.
      rules: vLLM's own offloading behind the cache, whose rules hold then (`hkv.serving.block_objects`); its number of
        chunks and its policy are the tier's own affair. None for LMCache's.
    """

    tier: ObjectTier
    model: str
    chunk: int | None = None
    rank: int = kv_rank(1, 0, 1, 0)
    rules: OffloadConfig | None = None

    def objects(self, serving: Serving) -> ChunkObjects:
        """The objects of a cache in it."""
        if self.rules is None:
            return chunk_objects(serving, self.chunk)
        if self.chunk is not None:
            raise ConfigError("chunk", self.chunk, "None beside rules: vLLM's chunks are blocks")
        return block_objects(serving, self.rules)


def store(serving: Serving, offload: Offload, row: int, tokens: Sequence[int], root: Sequence[int] = ROOT) -> int:
    """Copies the pages of a row's computed prefix to objects, those that the tier has not yet.

    An object is stored if the row has all blocks of it: windows and states that the row gave back, or passed over, can
    only be stored before, so call it after every step that ends a chunk. Under vLLM's rules, of the prompt alone, what
    its retention keeps. Runs on the host.

    Args:
      serving: the cache; stays as it is.
      offload: the tier.
      row: the row.
      tokens: its tokens, from the first on; those behind the computed ones do not count.
      root: uint32[4], what `arrive` was given for it. Other roots have other objects.

    Returns:
      How many objects were stored.

    Raises:
      OperationError: no such row, or tokens that are not those computed in it; in debug mode, a chunk that a layer has
        not written.
      ConfigError, LayoutError: as `hkv.serving.objects.chunk_objects`.
      MissingExtraError: blake3 is not installed.
    """
    cache = serving.cache
    rows = cache.tables.shape[0]
    if not 0 <= row < rows:
        raise OperationError("row", row, f"a row from 0 to {rows - 1}")
    objects = offload.objects(serving)
    computed = min(len(tokens), int(cache.computed[row]))
    prefix = list(tokens[:computed])
    chain = _chain(cache, prefix, root)
    if not np.array_equal(chain, np.asarray(cache.state.chains[row, : len(chain)])):
        raise OperationError("tokens", f"{computed} tokens", f"those computed in row {row}, and its root")
    names = _names(offload, objects, prefix, root)
    table, stored = np.asarray(cache.tables[row]), 0
    wanted = [range(len(of_kind)) for of_kind in names]
    if offload.rules is not None:
        request = np.asarray(cache.state.requests[row])
        length = min(int(request[StepRequest.PROMPT]) or len(tokens), len(tokens))
        wanted = offered(offload.rules, length, computed, int(request[StepRequest.SHARED_PREFIX]))
    for entry, of_kind, some in zip(objects.entries, names, wanted, strict=True):
        due = [
            chunk
            for chunk, name in ((chunk, of_kind[chunk]) for chunk in some)
            if all(table[member.group, list(_held(member, chunk))].all() for member in entry.members)
            and name not in offload.tier
        ]
        if serving.marks is not None:
            _require_written(serving, entry, due, table)
        for _, chunks in batches(due, RETRIEVE_BATCH):
            blocks = _tables(entry, chunks, lambda group, column: int(table[group, column]))
            for chunk, data in zip(chunks, np.asarray(_pack(serving.pool, entry, blocks)), strict=False):
                stored += offload.tier.store(of_kind[chunk], data)
    return stored


def load(serving: Serving, offload: Offload, tokens: Sequence[int], root: Sequence[int] = ROOT) -> tuple[Serving, int]:
    """Reads the longest prefix that the tier serves into free blocks, where the next `arrive` finds it.

    Blocks that the cache has already are not read again, and under vLLM's rules none before its own hit's end. All
    count as just given back: what was used longest ago makes room. Runs on the host; the blocks are found and
    registered in one compiled call, and the bytes written in some.

    Args:
      serving: the cache, donated.
      offload: the tier.
      tokens: a prompt.
      root: uint32[4], what `arrive` is going to be given for it.

    Returns:
      The cache, and the tokens of the prefix that it has now, as far as the tier knows; 0, with nothing changed, if
      none is found, or fewer blocks are free than it takes.

    Raises:
      ConfigError, LayoutError: as `hkv.serving.objects.chunk_objects`.
      OperationError: an object of another size.
      MissingExtraError: blake3 is not installed.
    """
    cache = serving.cache
    longest = cache.state.chains.shape[1] * int(cache.parameters.cache[CacheField.HASH_BLOCK])
    objects, prompt = offload.objects(serving), list(tokens[:longest])
    local = 0 if offload.rules is None else _local_hit(cache, prompt, root)
    names = _names(offload, objects, prompt, root)
    hit, found = _retrieved(offload.tier, objects, names, _chooser(offload, objects, len(prompt), local))
    if not hit:
        return serving, 0
    held = {  # of the hit, which is not read: blocks that must not make room for the others
        (group, -column)
        for group, entry in enumerate(objects.entries if local else ())
        for column in range(local // entry.tokens)
        if offload.rules is not None and offload.rules.window(group) is None
    }
    held |= {
        (member.group, -column)
        for entry, data in zip(objects.entries, found, strict=True)
        for member in entry.members
        for chunk in data
        for column in _held(member, chunk)
    }
    lanes = sorted(held)  # group by group, the last entry first, as a request gives them back
    chain, scales = _chain(cache, prompt, root), np.asarray(cache.parameters.groups)[:, GroupField.SCALE]
    room = 1 << (len(lanes) - 1).bit_length()
    groups, keys = np.full(room, PAD, np.int32), np.zeros((room, 4), np.uint32)
    for lane, (group, column) in enumerate(lanes):
        groups[lane], keys[lane] = group, chain[(1 - column) * max(1, int(scales[group])) - 1]
    cache, blocks, status = _insert(cache, groups, keys)
    serving = dataclasses.replace(serving, cache=cache)
    if int(status) != int(Status.OK):
        return serving, 0
    block = dict(zip(lanes, np.asarray(blocks).tolist(), strict=False))
    pool, written = serving.pool, serving.marks
    for entry, of_kind in zip(objects.entries, found, strict=True):
        if written is not None:
            written = _noted(serving, written, entry, list(of_kind), block)
        for _, chunks in batches(list(of_kind), RETRIEVE_BATCH):
            data = np.zeros((RETRIEVE_BATCH, entry.layout.nbytes), np.uint8)
            data[: len(chunks)] = [of_kind[chunk] for chunk in chunks]
            pool = _unpack(pool, entry, data, _tables(entry, chunks, lambda group, column: block[group, -column]))
    return dataclasses.replace(serving, pool=pool, marks=written), hit


def _require_written(serving: Serving, entry: Entry, chunks: Sequence[int], table: np.ndarray) -> None:
    """Requires the debug marks of all that chunks' objects would hold."""
    assert serving.marks is not None
    for member, chunk in itertools.product(entry.members, chunks):
        columns = _held(member, chunk)
        lengths = _lengths(serving.cache, member, columns)
        for layer in member.layers:
            held = np.asarray(serving.marks.layers[serving.layers.index(layer)])[table[member.group, list(columns)]]
            if not (held == lengths if layer.states else held).all():
                raise OperationError("row", f"chunk {chunk} of layer {layer.name!r}", "pages that were written")


def _noted(serving: Serving, written: Marks, entry: Entry, chunks: Sequence[int], block: Blocks) -> Marks:
    """The debug marks with the blocks of chunks' objects written."""
    for member, chunk in itertools.product(entry.members, chunks):
        columns = _held(member, chunk)
        ids, lengths = [block[member.group, -column] for column in columns], _lengths(serving.cache, member, columns)
        for layer in member.layers:
            written = marks.whole_blocks(written, serving.layers.index(layer), layer, np.array(ids), lengths)
    return written


def _lengths(cache: Cache, member: Member, columns: range) -> np.ndarray:
    """Tokens before the end of each entry of a row."""
    return (np.array(columns) + 1) * cache.block_sizes[member.group]


def _names(offload: Offload, objects: ChunkObjects, tokens: Sequence[int], root: Sequence[int]) -> list[list[bytes]]:
    """Keys of the objects of each kind, one a whole chunk of tokens."""
    salt = "" if tuple(root) == ROOT else "".join(f"{int(word):08x}" for word in root)
    hashes = {size: chunk_keys(tokens, size) for size in {entry.tokens for entry in objects.entries}}
    return [
        [
            _name(ObjectKey(each, offload.model, offload.rank, number, salt), objects.digest)
            for each in hashes[entry.tokens]
        ]
        for number, entry in enumerate(objects.entries)
    ]


def _name(key: ObjectKey, digest: bytes) -> bytes:
    """A key in 64 bytes: the chunk's, and what else tells objects apart."""
    rest = repr((key.model_name, key.kv_rank, key.object_group_id, key.cache_salt)).encode()
    return key.chunk_hash + hashlib.sha256(digest + rest).digest()


def _held(member: Member, chunk: int) -> range:
    """Entries of a row whose blocks are in a chunk's object."""
    end = (chunk + 1) * member.per_chunk
    return range(end - member.kept, end)


def _local_hit(cache: Cache, prompt: list[int], root: Sequence[int]) -> int:
    """Tokens of a prompt that `arrive` finds in the cache."""
    size = int(cache.parameters.cache[CacheField.HASH_BLOCK])
    padded = np.zeros((1, cache.state.chains.shape[1] * size), np.int32)
    padded[0, : len(prompt)] = np.asarray(prompt, np.int64).astype(np.uint32).view(np.int32)
    return int(_look_up(cache, padded, np.array([len(prompt)], np.int32), np.array([root], np.uint32)))


@typed_jit()
def _look_up(cache: Cache, tokens: Array, counts: Ids | Array, roots: Array) -> jax.Array:
    *_, found = look_up(cache.parameters, cache.state, roots, tokens, counts)
    return found.hits[0]


Chooser = Callable[[Sequence[set[int]]], tuple[int, Sequence[Sequence[int]]]]
"""From the chunks of each kind that a tier has to the tokens of the longest prefix, and the chunks that it reads."""


def _chooser(offload: Offload, objects: ChunkObjects, tokens: int, local: int) -> Chooser:
    """LMCache's lookup, or vLLM's behind the cache's own hit of a prompt of so many tokens."""
    rules = offload.rules

    def of_lmcache(present: Sequence[set[int]]) -> tuple[int, Sequence[Sequence[int]]]:
        rows = [ChunkRow.of(there, entry.window) for there, entry in zip(present, objects.entries, strict=True)]
        best = longest_prefix(rows, tokens // objects.chunk)
        return best.hit * objects.chunk, best.retained

    def of_vllm(present: Sequence[set[int]]) -> tuple[int, Sequence[Sequence[int]]]:
        assert rules is not None
        found = longest_load(rules, present, local, tokens)
        return (0, [()] * len(present)) if found is None else (found.end, found.chunks)

    return of_lmcache if rules is None else of_vllm


def _retrieved(
    tier: ObjectTier, objects: ChunkObjects, names: list[list[bytes]], choose: Chooser
) -> tuple[int, list[dict[int, np.ndarray]]]:
    """Tokens of the longest prefix that every kind of object serves, and for each kind those that it reads."""
    present = [{chunk for chunk, name in enumerate(of_kind) if name in tier} for of_kind in names]
    while True:
        hit, chosen = choose(present)
        found: list[dict[int, np.ndarray]] = [{} for _ in names]
        for number, entry in enumerate(objects.entries):
            for chunk in chosen[number]:
                data = tier.retrieve(names[number][chunk])
                if data is None:
                    present[number].discard(chunk)  # damaged, or evicted meanwhile: a shorter prefix may be served
                    break
                found[number][chunk] = _checked(data, entry)
        if all(len(found[number]) == len(chosen[number]) for number in range(len(names))):
            return hit, found


def _checked(data: Any, entry: Entry) -> np.ndarray:
    """The bytes of an object.

    Raises:
      OperationError: not as many as it has to have.
    """
    found = np.asarray(data.data if isinstance(data, StoredObject) else data)
    if found.dtype != np.uint8 or found.shape != (entry.layout.nbytes,):
        raise OperationError("tier", f"an object {found.dtype}{list(found.shape)}", f"{entry.layout.nbytes} bytes")
    return found


def _tables(entry: Entry, chunks: Sequence[int], block: Callable[[int, int], int]) -> tuple[np.ndarray, ...]:
    """Block of every entry that some chunks' objects hold, for each member, int32[RETRIEVE_BATCH * kept]; -1 behind."""
    found = []
    for member in entry.members:
        ids = np.full(RETRIEVE_BATCH * member.kept, -1, np.int32)
        columns = [column for chunk in chunks for column in _held(member, chunk)]
        ids[: len(columns)] = [block(member.group, column) for column in columns]
        found.append(ids)
    return tuple(found)


def _chain(cache: Cache, tokens: Sequence[int], root: Sequence[int]) -> np.ndarray:
    """Keys of the whole hash blocks of a row's tokens, uint32[n, 4]."""
    size = int(cache.parameters.cache[CacheField.HASH_BLOCK])
    padded = np.zeros(cache.state.chains.shape[1] * size, np.int32)
    padded[: len(tokens)] = np.asarray(tokens, np.int64).astype(np.uint32).view(np.int32)
    found = _prefix_keys(cache, padded, np.int32(len(tokens)), np.array(root, np.uint32))
    return np.asarray(found[: len(tokens) // size])


@typed_jit()
def _prefix_keys(cache: Cache, tokens: Array, count: Ids | Array, root: Array) -> jax.Array:
    return prefix_keys(cache.parameters, cache.state, root[None], tokens[None], count[None])[0]


@typed_jit(donate_argnames="cache")
def _insert(cache: Cache, groups: Ids | Array, keys: Array) -> tuple[Cache, jax.Array, jax.Array]:
    state, blocks, status = insert(cache.state, groups, keys)
    return dataclasses.replace(cache, state=state), blocks, status


@typed_jit(static_argnames="entry")
def _pack(pool: jax.Array, entry: Entry, tables: tuple[Ids | Array, ...]) -> jax.Array:
    """Objects uint8[RETRIEVE_BATCH, bytes] of the blocks that `_tables` names."""
    found = []
    for member, table in zip(entry.members, tables, strict=True):
        for layer in member.layers:
            parts, _ = paged.gather(pool, layer.layout, layer.index, table, parts=(member.part,))
            found.append(lax.bitcast_convert_type(parts[member.part], jnp.uint8).reshape(RETRIEVE_BATCH, -1))
    return jnp.concatenate(found, axis=1)


@typed_jit(static_argnames="entry", donate_argnames="pool")
def _unpack(pool: jax.Array, entry: Entry, objects: Array, tables: tuple[Ids | Array, ...]) -> jax.Array:
    """The pool with objects uint8[RETRIEVE_BATCH, bytes] in the blocks that `_tables` names."""
    start = 0
    for member, table in zip(entry.members, tables, strict=True):
        for layer in member.layers:
            part = layer.layout.part(member.part)
            heads = layer.layout.shape[2] if part.heads is None else part.heads
            shape = (len(table) * layer.layout.states_per_block, heads, *part.shape)
            dtype = numpy_dtype(part.dtype)
            size = math.prod(shape) * dtype.itemsize // RETRIEVE_BATCH
            data = objects[:, start : start + size].reshape(*shape, *([dtype.itemsize] if dtype.itemsize > 1 else []))
            values = {member.part: lax.bitcast_convert_type(data, dtype)}
            pool, _ = paged.scatter(pool, layer.layout, layer.index, table, values)
            start += size
    return pool
