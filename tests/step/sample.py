"""Random configurations for whole steps, and how a compiled state compares with the reference."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from hypothesis import strategies as st

from hkv.cache.state import (
    ERA,
    HASH_WORDS,
    OWN_ERA,
    StepCounter,
    StepRequest,
    StepRow,
    StepState,
    row_fields,
    states_inside_blocks,
)
from hkv.dialects.vllm.config import VllmConfig
from hkv.model.topology import Topology
from hkv.spec import ChunkedLocal, FullAttention, Mamba, OpaqueState, SlidingWindow, retained_sparsely
from reference.dialects.vllm.kinds.kind import GroupRow
from reference.keys import fingerprint
from reference.step import FingerprintRequest, Rows

SIZES = ((2, 4, 8), (1, 2, 4), (4,), (3, 6), (4, 8))


@st.composite
def configs(draw, least_blocks: int = 4) -> VllmConfig:
    """A configuration that whole steps can express: at most three groups."""
    sizes = draw(st.sampled_from(SIZES))
    full_size = draw(st.sampled_from((*sizes[:1] * 3, *sizes)))
    count = draw(st.integers(1, 3))
    caching = draw(st.integers(0, 9)) > 0
    alike = draw(st.integers(0, 3)) == 0
    specs = []
    for _ in range(count):
        size = sizes[0] if alike else draw(st.sampled_from(sizes))
        kind = draw(st.sampled_from(("full", "window", "window", "mamba", "opaque", "chunked" if alike else "full")))
        if kind == "full":
            specs.append(FullAttention(block_size=full_size))
        elif kind == "window":
            specs.append(SlidingWindow(block_size=size, window=draw(st.sampled_from((1, 2, 3, size + 1, 9, 500)))))
        elif kind == "chunked":
            specs.append(ChunkedLocal(block_size=size, chunk=size * draw(st.integers(1, 3)) + draw(st.integers(0, 1))))
        elif kind == "mamba":
            mode = "align" if caching else draw(st.sampled_from(("none", "align")))
            scratch = draw(st.sampled_from((0, 0, 1, 3)))
            specs.append(Mamba(block_size=size, cache_mode=mode, num_speculative_blocks=scratch))
        else:
            specs.append(OpaqueState(block_size=size))
    if all(spec.kind == "opaque" for spec in specs):
        specs[0] = FullAttention(block_size=sizes[0])
    cacheable = [spec.block_size for spec in specs if spec.prefix_cacheable]
    eagle = not any(spec.kind == "chunked_local" for spec in specs) and draw(st.integers(0, 3)) == 0
    scheduler_block = math.lcm(*(spec.block_size for spec in specs))
    intervals = [None, None, 0]
    if any(retained_sparsely(spec) for spec in specs):
        intervals += [0, scheduler_block, 2 * scheduler_block]
    config = VllmConfig(
        topology=Topology.of_specs(specs),
        num_blocks=draw(st.integers(least_blocks, 60)),
        hash_block_size=math.gcd(*cacheable),
        scheduler_block_size=scheduler_block,
        retention_interval=draw(st.sampled_from(intervals)),
        caching=caching,
        eagle=eagle,
        watermark=draw(st.sampled_from((0.0, 0.0, 0.1, 0.4))),
        max_model_len=48,
    )
    return expressible(config)


def expressible(config: VllmConfig) -> VllmConfig:
    """The configuration, without EAGLE where whole steps would refuse it for that."""
    return dataclasses.replace(config, eagle=False) if states_inside_blocks(config) else config


def partial_of(held: GroupRow | None) -> int:
    """The entry that a row has to copy, plus 1; 0 for none."""
    return 0 if held is None or held.partial is None else held.partial[0] + 1


def prefill_of(request: FingerprintRequest) -> int:
    """Tokens that it came with, less the last, if it is one that comes again; else 0."""
    return request.given - 1 if request.given - 1 > request.num_prompt else 0


def hashing_of(rows: Rows, row: int) -> np.ndarray:
    """State of the hashing of a row's tokens, in words."""
    request, size = rows.request(row), rows.config.hash_block_size
    links = request.links
    tail = request.tokens[len(links) * size :]
    words = np.zeros(HASH_WORDS, np.uint32)
    words[:4] = links[-1] if links else request._root
    digest = [size] * 4
    for start in range(0, len(tail), 4):
        four = tail[start : start + 4]
        if len(four) == 4:
            fingerprint.absorb(digest, four)
        words[8:] = [*four, *[0] * (4 - len(four))]
    words[4:8] = digest
    return words


def enumerate_keys(rows: Rows):
    """Every key in the table, with the block that counts."""
    pool = rows.manager.pool
    seen = {key for block in range(pool.num_blocks) for key in pool.keys_of(block)}
    return [(key, pool.table.first(key)) for key in sorted(seen)]


def assert_same(rows: Rows, state: StepState) -> None:
    """The compiled state says of every block, row and key what the reference says."""
    arrays = {name: np.asarray(value) for name, value in vars(state).items()}
    pool, config = rows.manager.pool, rows.config
    head, tail = (int(arrays["counters"][c]) for c in (StepCounter.HEAD, StepCounter.TAIL))
    size = len(arrays["queue"])
    assert [int(arrays["queue"][place % size]) for place in range(head, tail)] == list(pool.free)
    assert (arrays["refs"][: config.num_blocks] // 2).tolist() == pool.refs
    assert int(arrays["counters"][StepCounter.EVICTIONS]) == pool.evictions
    assert_same_keys(rows, arrays)
    for row, name in enumerate(rows.names):
        request = rows.request(row)
        assert int(arrays["requests"][row, StepRequest.LIVE]) == (name is not None)
        if request is None:
            assert not arrays["rows"][row].any()
            continue
        fields = [int(arrays["requests"][row, field]) for field in StepRequest][1:]
        assert fields == [request.num_computed, request.num_prompt, request.shared_prefix]
        for group, blocks in enumerate(rows.manager.rows(request.id)):
            padded = np.zeros(arrays["rows"].shape[2], np.int32)
            padded[: len(blocks)] = blocks
            assert arrays["rows"][row, group].tolist() == padded.tolist()
        assert_same_fields(rows, arrays, row, request)
        keys = arrays["chains"][row, : len(request.keys)]
        assert [tuple(key) for key in keys.tolist()] == request.keys
        assert arrays["hashing"][row, :4].tolist() == hashing_of(rows, row)[:4].tolist()


def assert_same_fields(rows: Rows, arrays: dict[str, np.ndarray], row: int, request: FingerprintRequest) -> None:
    """A row has to copy what the reference's has to, where hits end inside blocks, and left the same states behind."""
    groups = arrays["rows"].shape[1]
    lines = arrays["requests"][row, len(StepRequest) :].reshape(-1, groups).tolist()
    found = dict(zip(row_fields(len(lines)), lines, strict=True))
    held = [kind.rows.get(rows.names[row]) for kind in rows.manager.cache.kinds]
    if StepRow.PARTIAL in found:
        assert found[StepRow.PARTIAL][: len(held)] == [partial_of(one) for one in held]
    if StepRow.EXPORT in found:
        planned = [getattr(one, "checkpoint", None) or (0, 0) for one in held]
        assert list(zip(found[StepRow.EXPORT], found[StepRow.EXPORT_ENTRY], strict=True))[: len(held)] == planned
        assert found[StepRow.PREFILL] == [prefill_of(request)] * groups


def assert_same_keys(rows: Rows, arrays: dict[str, np.ndarray]) -> None:
    """Every block has the keys that the reference gives it, and of blocks with the same key the same one counts."""
    pool = rows.manager.pool
    first: dict[tuple, tuple[int, int]] = {}
    parts = entries_of(rows, arrays)
    for block in range(pool.num_blocks):
        found = [(key, stamp) for key, stamp in (parts(block) if arrays["refs"][block] % 2 else [])]
        wanted = pool.keys_of(block)
        # Where hits end with blocks, a full block may have the key of a prompt's tail besides: nobody looks for it.
        assert sorted(key for key, _ in found) == sorted(wanted if rows.config.partial_hits else wanted[:1])
        for key, stamp in found:
            first[key] = min(first.get(key, (stamp, block)), (stamp, block))
    counted = dict(enumerate_keys(rows))
    if not rows.config.partial_hits:
        counted = {key: block for key, block in counted.items() if pool.primary[block] == key}
    assert {key: first[key][1] for key in counted} == counted


def entries_of(rows: Rows, arrays: dict[str, np.ndarray]):
    """Function from a registered block to its keys, each with its turn of registration."""
    size, keys = len(arrays["refs"]), arrays["keys"].tolist()

    def keys_of(block: int) -> list[tuple[tuple, int]]:
        entries = [keys[entry] for entry in range(block, len(keys), size)]
        if len(keys) > size:
            entries = [entry for entry in entries if entry[ERA] == entries[0][OWN_ERA]]
        return [((entry[4], tuple(entry[:4])), entry[5]) for entry in entries]

    return keys_of
