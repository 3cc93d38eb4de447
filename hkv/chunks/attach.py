"""LMCache 0.5.6 under observation: calls of its bookkeeping, each judged by HKV's chunk oracle as it answers.

Hooked are functions and methods that decide which chunks there are, under which keys, and which of them a request is
served from. None of them touches a GPU. Their answers are compared with `hkv.chunks` and `hkv.keys.blake3`; what a
cache holds is taken from LMCache's own index, and a call during which that changed is not judged.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hkv.chunks.kernel_groups import EngineGroupInfo, expand_block_ids, slice_block_ids
from hkv.chunks.plans import ChunkRow, longest_prefix, skip_in_window
from hkv.errors import HKVError
from hkv.keys.blake3 import chunk_keys, kv_rank

Judge = Callable[[str, Mapping[str, Any], Any, Any], None]
"""Takes a call's name, its arguments, the answer that HKV's oracle gives, and LMCache's."""

REFUSED = "refused"
"""Answer of a call that raises a ValueError, or an error of HKV's."""


def observe(judge: Judge) -> Callable[[], None]:
    """Has the calls of this process's LMCache judged from now on; calling what it returns ends that.

    Functions that modules have imported by name are replaced there too. What a judge raises, LMCache's caller gets.
    """
    places = [(_owner(place), name, hook) for place, name, hook in HOOKS]  # all are imported before any is hooked
    undo = [_hooked(owner, name, functools.partial(hook, judge)) for owner, name, hook in places]

    def detach() -> None:
        for each in reversed(undo):
            each()

    return detach


def _owner(place: str) -> Any:
    module, _, attribute = place.partition(":")
    found = importlib.import_module(f"lmcache.{module}")
    return getattr(found, attribute) if attribute else found


def _hooked(owner: Any, name: str, hook: Callable[..., Any]) -> Callable[[], None]:
    """Puts a hook in place of a function: it gets the function, then the call's arguments."""
    plain = vars(owner)[name]
    function = plain.__func__ if isinstance(plain, staticmethod) else plain

    @functools.wraps(function)
    def hooked(*arguments: Any, **named: Any) -> Any:
        return hook(function, *arguments, **named)

    new = staticmethod(hooked) if isinstance(plain, staticmethod) else hooked
    holders = [owner]
    if not isinstance(owner, type):
        modules = [module for each, module in list(sys.modules.items()) if each.startswith("lmcache.")]
        holders += [module for module in modules if vars(module).get(name) is plain and module is not owner]
    for holder in holders:
        setattr(holder, name, new)

    def undo() -> None:
        for holder in holders:
            setattr(holder, name, plain)

    return undo


def _judged(judge: Judge, call: str, said: Mapping[str, Any], want: Callable[[], Any], got: Callable[[], Any]) -> Any:
    """LMCache's answer, after it was judged; a refusal is an answer, and is raised after it."""
    refusal: ValueError | None = None
    try:
        answer = found = got()
    except ValueError as error:
        refusal, answer, found = error, REFUSED, None
    try:
        wanted = want()
    except HKVError:
        wanted = REFUSED
    judge(call, said, wanted, answer)
    if refusal is not None:
        raise refusal
    return found


def _hashes(
    judge: Judge,
    plain: Any,
    hasher: Any,
    token_ids: Sequence[int],
    prefix_hash: Any = None,
    start: int = 0,
    end: Any = None,
) -> Any:
    """`TokenHasher.compute_chunk_hashes`: the blake3 chain of whole chunks, from the root."""
    got = functools.partial(plain, hasher, token_ids, prefix_hash, start, end)
    if hasher.hash_algorithm_name != "blake3" or prefix_hash is not None:
        return got()
    said = {"tokens": list(token_ids), "chunk": hasher.chunk_size, "start": start, "end": end}
    whole = len(token_ids) // hasher.chunk_size * hasher.chunk_size
    last = None if end is None else min(end, whole)
    return _judged(
        judge, "compute_chunk_hashes", said, lambda: chunk_keys(list(token_ids), hasher.chunk_size, start, last), got
    )


def _fold(judge: Judge, plain: Any, rows: Sequence[Any], windows: Sequence[int]) -> Any:
    """`fold_unfold_grouped`: the longest prefix that every object group serves, and the chunks that are kept for it."""
    present = [bits.get_indices_list() for bits in rows]
    length = len(rows[0]) if rows else 0
    hit, kept = plain(rows, windows)
    found = longest_prefix([ChunkRow.of(each, window) for each, window in zip(present, windows, strict=True)], length)
    said = {"present": present, "windows": list(windows), "chunks": length}
    judge(
        "fold_unfold_grouped",
        said,
        [found.hit, *map(list, found.retained)],
        [hit, *(bits.get_indices_list() for bits in kept)],
    )
    return hit, kept


def _rank(judge: Judge, plain: Any, world_size: int, global_rank: int, local_world_size: int, local_rank: int) -> int:
    """`ObjectKey.ComputeKVRank`."""
    ranks = (world_size, global_rank, local_world_size, local_rank)
    got = plain(*ranks)
    judge("ComputeKVRank", {"ranks": list(ranks)}, kv_rank(*ranks), got)
    return got


def _expand(judge: Judge, plain: Any, engine_group_infos: Sequence[Any], block_ids: Any) -> Any:
    """`expand_engine_block_ids`: block ids of each kernel group."""
    infos = [
        EngineGroupInfo(
            info.engine_group_id,
            tuple(info.layer_indices),
            info.tokens_per_block,
            info.sw_size_tokens,
            info.extra_object_group_tag,
            info.recurrent_state,
        )
        for info in engine_group_infos
    ]
    said = {"groups": [info.engine_group_id for info in infos], "ids": block_ids}
    return _judged(
        judge,
        "expand_engine_block_ids",
        said,
        lambda: expand_block_ids(infos, block_ids),
        lambda: plain(engine_group_infos, block_ids),
    )


def _slice(judge: Judge, plain: Any, ids: Any, tokens_per_block: Sequence[int], start: int, end: int) -> Any:
    """`slice_block_ids_per_group`: the blocks of a range of tokens."""
    said = {"ids": ids, "tokens_per_block": list(tokens_per_block), "start": start, "end": end}
    return _judged(
        judge,
        "slice_block_ids_per_group",
        said,
        lambda: slice_block_ids(ids, tokens_per_block, start, end),
        lambda: plain(ids, tokens_per_block, start, end),
    )


def _skip(judge: Judge, plain: Any, blocks_per_chunk: int, blocks_per_window: int, blocks_to_skip: int) -> int:
    """`recalculate_blocks_to_skip`: blocks skipped of those that a window keeps."""
    counts = (blocks_per_chunk, blocks_per_window, blocks_to_skip)
    got = plain(*counts)
    judge("recalculate_blocks_to_skip", {"counts": list(counts)}, skip_in_window(*counts), got)
    return got


def _process(
    judge: Judge,
    plain: Any,
    database: Any,
    tokens: Any = None,
    hashes: Any = None,
    offsets: Any = None,
    mask: Any = None,
    make_key: bool = True,
    request_configs: Any = None,
) -> Iterator[Any]:
    """`ChunkedTokenDatabase.process_tokens`: which chunks there are, and that keys tell prefixes apart.

    A key stands for the prefix up to the end of its chunk: two prefixes have two keys, and one prefix one, as long as
    the database lives. HKV's own keys say which prefixes are the same.
    """
    found = list(plain(database, tokens, hashes, offsets, mask, make_key, request_configs))
    known = [] if tokens is None else _listed(tokens)
    if tokens is not None and all(0 <= token < 1 << 32 for token in known):
        skipped = 0 if mask is None else len(mask) - int(mask.sum())
        size, whole = database.chunk_size, database.config is None or database.config.save_unfull_chunk
        said = {"tokens": known, "chunk": size, "skipped": skipped, "unfull": whole}
        ranges = _ranges(len(known), size, skipped, whole)
        judge("process_tokens", said, ranges, [[start, end] for start, end, _ in found])
        names = vars(database).setdefault("_hkv_names", {})
        prefixes = vars(database).setdefault("_hkv_prefixes", {})
        for start, end, key in found:
            prefix = _prefix(known[:end], size)
            hashed = getattr(key, "chunk_hash", key)
            said = {"tokens": known[:end], "chunk": size, "start": start}
            judge("key of a prefix", said, names.setdefault(prefix, hashed), hashed)
            judge("prefix of a key", said, prefixes.setdefault(hashed, prefix).hex(), prefix.hex())
    yield from found


def _lookup(judge: Judge, plain: Any, engine: Any, tokens: Any = None, **named: Any) -> int:
    """`LMCacheEngine.lookup`: tokens of the longest prefix of stored chunks."""
    before = _served(engine, tokens, named.get("request_configs"))
    got = plain(engine, tokens, **named)
    if before is not None and named.get("search_range") is None:
        said, ends = before
        if before == _served(engine, tokens, named.get("request_configs")):
            judge("lookup", said, ends[-1] if ends else 0, got)
    return got


def _retrieve(judge: Judge, plain: Any, engine: Any, tokens: Any, mask: Any = None, **named: Any) -> Any:
    """`LMCacheEngine.retrieve`: the mask of tokens that were retrieved."""
    before = _served(engine, tokens, named.get("request_configs"), mask)
    got = plain(engine, tokens, mask, **named)
    if before is not None and not engine.remove_after_retrieve:
        said, ends = before
        if before == _served(engine, tokens, named.get("request_configs"), mask):
            first = said["skipped"]
            count = ends[-1] - first if ends else 0
            judge("retrieve", said, [[first, first + count]] if count else [], _runs(got.tolist()))
    return got


def _store(judge: Judge, plain: Any, engine: Any, tokens: Any = None, **named: Any) -> None:
    """`LMCacheEngine.store`: nothing but chunks of the request comes into the index, one after the other."""
    mask, backend = named.get("mask"), _backend(engine)
    before = None if backend is None else set(backend.get_keys())
    plain(engine, tokens, **named)
    if backend is None or before is None or tokens is None:
        return
    served = _served(engine, tokens, named.get("request_configs"), mask)
    after = set(backend.get_keys())
    if served is None or not before <= after:  # something was evicted for it
        return
    said, ends = served
    process = _plain(engine.token_database.process_tokens)
    chunks = list(process(engine.token_database, tokens, mask=mask, request_configs=named.get("request_configs")))
    judge("keys that a store adds", said, [], sorted(map(str, after - before - {key for _, _, key in chunks})))
    there = [end for _, end, key in chunks if key in after]
    judge("chunks after a store", said, ends, there)


HOOKS: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    ("v1.multiprocess.token_hasher:TokenHasher", "compute_chunk_hashes", _hashes),
    ("v1.distributed.bitmap_ops.fold", "fold_unfold_grouped", _fold),
    ("v1.distributed.api:ObjectKey", "ComputeKVRank", _rank),
    ("v1.multiprocess.group_view", "expand_engine_block_ids", _expand),
    ("v1.multiprocess.group_view", "slice_block_ids_per_group", _slice),
    ("v1.multiprocess.object_group_transfer", "recalculate_blocks_to_skip", _skip),
    ("v1.token_database:ChunkedTokenDatabase", "process_tokens", _process),
    ("v1.cache_engine:LMCacheEngine", "lookup", _lookup),
    ("v1.cache_engine:LMCacheEngine", "retrieve", _retrieve),
    ("v1.cache_engine:LMCacheEngine", "store", _store),
)
"""Module or class, function, and the hook that judges it."""


def _ranges(tokens: int, chunk: int, skipped: int, unfull: bool) -> list[list[int]]:
    """Chunks of so many tokens, from the first that is not skipped; the last may be shorter if `unfull`."""
    whole = [[start, start + chunk] for start in range(0, tokens - chunk + 1, chunk)]
    tail = [[len(whole) * chunk, tokens]] if unfull and tokens % chunk else []
    return [each for each in whole + tail if each[0] >= skipped]


def _prefix(tokens: list[int], chunk: int) -> bytes:
    """Name of a prefix: HKV's key of its last chunk, of whatever length."""
    keys = chunk_keys(tokens, chunk)
    rest = tokens[len(keys) * chunk :]
    return (keys[-1] if keys else b"") + b"".join(token.to_bytes(4, "big") for token in rest)


def _backend(engine: Any) -> Any:
    """The only place that an engine keeps chunks in, the memory of the CPU; None if there are others."""
    manager = engine.storage_manager
    backends = {} if manager is None else dict(manager.storage_backends)
    (name, backend), *more = list(backends.items()) or [("", None)]
    return backend if name == "LocalCPUBackend" and not more and not engine.use_layerwise else None


def _served(engine: Any, tokens: Any, configs: Any, mask: Any = None) -> tuple[dict[str, Any], list[int]] | None:
    """Facts of a call, and the ends of the chunks of the longest prefix that is stored, by HKV's rule; None where there
    is more than one place that chunks are in."""
    backend = _backend(engine)
    if backend is None or tokens is None or not engine.is_healthy():
        return None
    process = _plain(engine.token_database.process_tokens)
    chunks = list(process(engine.token_database, tokens, mask=mask, request_configs=configs))
    held = set(backend.get_keys())
    present = [index for index, (_, _, key) in enumerate(chunks) if key in held]
    hit = longest_prefix([ChunkRow.of(present)], len(chunks)).hit if chunks else 0
    skipped = chunks[0][0] if chunks else 0
    said = {"tokens": len(tokens), "skipped": skipped, "chunks": len(chunks), "present": present}
    return said, [end for _, end, _ in chunks[:hit]]


def _plain(method: Any) -> Any:
    """The function of a method as it was before it was hooked."""
    function = method.__func__
    return getattr(function, "__wrapped__", function) if function.__name__ == "process_tokens" else function


def _listed(tokens: Any) -> list[int]:
    return tokens.tolist() if hasattr(tokens, "tolist") else list(tokens)


def _runs(mask: Sequence[bool]) -> list[list[int]]:
    """Beginnings and ends of the runs of true values."""
    edges = [
        index
        for index in range(len(mask) + 1)
        if (index < len(mask) and mask[index]) != (index > 0 and mask[index - 1])
    ]
    return [[start, end] for start, end in zip(edges[::2], edges[1::2], strict=True)]
