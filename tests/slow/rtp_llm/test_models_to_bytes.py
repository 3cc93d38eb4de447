"""Real models under RTP-LLM: config, plan, pools, a request's pages written, forked, stored, moved and read back."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from hkv.dialects.rtp_llm import data_plane
from hkv.dialects.rtp_llm.disaggregation import Server, carry, plan_moves
from hkv.dialects.rtp_llm.planned_cache import PlannedCache
from hkv.dialects.rtp_llm.planning import DescribedModel, RtpOptions, describe_model, plan_rtp_llm
from hkv.dialects.rtp_llm.transfers import store_plan
from hkv.layout.views.numpy import numpy_dtype
from hkv.layout.views.numpy import view as numpy_view
from hkv.model.group_policy import GroupType
from hkv.model.huggingface import ReadOptions, read_model
from hkv.tier.tier import MemoryTier
from reference.dialects.rtp_llm.manager import Manager

MODELS = pathlib.Path(__file__).resolve().parent.parent.parent / "data" / "models"
PRO, FLASH = [128, 128, *[4, 128] * 29, 4], [0, 0, *[4, 128] * 20, 4]
Lists = dict[str, list[int]]


@dataclasses.dataclass(frozen=True)
class Served:
    """A model of a test: fields of its `config.json`, by the name of one of the tests' files and changes, and its
    servers.

    `shapes` are settings of the prefill and of the decode server, `draft` the changes that make its MTP module. Layers
    in `kept` get pools; their sizes are those of the model.
    """

    config: tuple[str, dict[str, Any]]
    options: dict[str, Any]
    shapes: tuple[dict[str, Any], dict[str, Any]]
    kv_dtype: str = "auto"
    kept: int = 4
    draft: dict[str, Any] | None = None
    block_size: int = 64

    def read(self, changes: dict[str, Any], draft: bool = False) -> Any:
        fields = json.loads((MODELS / f"{self.config[0]}.json").read_text()) | self.config[1] | changes
        return read_model(fields, ReadOptions(block_size=self.block_size, kv_dtype=self.kv_dtype, draft=draft))


def split(prefill: int, decode: int) -> tuple[dict[str, Any], dict[str, Any]]:
    return {"role": "prefill", "tensor_parallel": prefill}, {"role": "decode", "tensor_parallel": decode}


def ratios(listed: list[int]) -> dict[str, Any]:
    return {"compress_ratios": listed, "num_hidden_layers": len(listed), "layer_types": None}


V4 = {"pools": "independent", "kernel_block_size": 128, "explicit_blocks": (("hca_state", 12),)}
SERVED = {
    "DeepSeek-V4 Pro": Served(("deepseek_v4", ratios(PRO)), V4, split(2, 4), kept=5, block_size=256),
    "DeepSeek-V4 Flash": Served(("deepseek_v4", ratios(FLASH)), V4, split(4, 2), kept=5, block_size=256),
    "DeepSeek-V3, float8, MTP": Served(
        ("deepseek_v3", {}), {"modules": 2}, split(4, 2), "fp8", draft={"num_hidden_layers": 1}
    ),
    "Qwen3-Next": Served(("qwen3_next", {}), {"block_size": 1024}, split(2, 1), kept=8, block_size=1024),
    "Llama, float8": Served(("llama", {}), {"kernel_block_size": 16}, split(2, 4), "fp8", kept=2),
}


def server(served: Served, role: dict[str, Any]) -> Server:
    """A server of the model's first layers; the plan of all of it is made too, and says the same of their sizes."""
    options = RtpOptions(**{"block_size": served.block_size, **served.options, **role})
    model = served.read({})
    draft = None if served.draft is None else served.read(served.draft, draft=True)
    whole = plan_rtp_llm(model, 200 << 30, options, draft)
    described = describe_model(model, options)
    few = DescribedModel(described.layers[: served.kept], described.latent_sizes, described.indexer_size)
    module = None if draft is None else describe_model(draft, options, draft=True)
    cache = PlannedCache.of_layers(few, options, num_blocks=12, draft=module)
    sizes = {group.tag: (group.stride, group.scale_stride) for group in whole.groups}
    assert all(sizes[group.tag] == (group.stride, group.scale_stride) for group in cache.plan.groups)
    return Server(cache, options)


def layers_of(cache: PlannedCache) -> list[tuple[int, str]]:
    groups = (group for groups in (cache.plan.groups, *cache.plan.modules) for group in groups)
    return [(layer, group.tag) for group in groups for layer in group.layers]


def content(cache: PlannedCache, pools: Any, lists: Lists) -> dict[tuple[int, str, str], bytes]:
    """All pages of a request, by layer, group and part."""
    found = {}
    for layer, tag in layers_of(cache):
        table = jnp.int32([block for block in lists[tag] if block > 0])
        parts, missing = data_plane.gather(pools, cache, layer, tag, table)
        assert int(missing) == 0
        found |= {(layer, tag, part): np.asarray(array).tobytes() for part, array in parts.items()}
    return found


def written(cache: PlannedCache, lists: Lists, seed: int) -> Any:
    pools = data_plane.on_device(cache)
    random = np.random.default_rng(seed)
    for layer, tag in layers_of(cache):
        table = [block for block in lists[tag] if block > 0]
        values = {}
        for part, view in cache.layer_cache(layer, tag).parts.items():
            states = view.shape[2] * cache.layer_cache(layer, tag).kernel_blocks
            shape = (len(table) * states, view.shape[1], *view.shape[3:])
            raw = random.bytes(int(np.prod(shape)) * numpy_dtype(view.dtype).itemsize)
            values[part] = jnp.asarray(np.frombuffer(raw, numpy_dtype(view.dtype)).reshape(shape))
        pools, missing = data_plane.scatter(pools, cache, layer, tag, jnp.int32(table), values)
        assert int(missing) == 0
    return pools


def stored_and_retrieved(prefill: Server, pools: Any, lists: Lists, tokens: int) -> Any:
    """The request's blocks in a tier under their keys, the pools lost, and the blocks put back from the tier."""
    cache, tier = prefill.cache, MemoryTier(1 << 30, "numpy")
    host = [np.array(pool) for pool in pools]
    keys = -(-tokens // prefill.block_size)
    plans = {group.tag: store_plan(group.policy, prefill.mapper(0), keys) for group in cache.plan.groups}
    spans = {}
    for tag, plan in plans.items():
        for stored in plan:
            block = lists[tag][stored.slot]
            mine = [
                span
                for layer, own in layers_of(cache)
                if own == tag
                for span in cache.addresses.buffers(layer, block, tag)
            ]
            spans[f"{tag}-{stored.key}".encode()] = mine
    for name, mine in spans.items():
        tier.store(name, np.concatenate([host[span.pool][span.offset : span.offset + span.size] for span in mine]))
    lost = [np.zeros_like(pool) for pool in host]
    for name, mine in spans.items():
        data, at = np.asarray(tier.retrieve(name)), 0
        for span in mine:
            lost[span.pool][span.offset : span.offset + span.size] = data[at : at + span.size]
            at += span.size
    return tuple(map(jnp.asarray, lost))


@pytest.mark.parametrize("name", SERVED)
def test_from_a_config_to_bytes_on_another_server(name: str) -> None:
    served = SERVED[name]
    prefill, decode = (server(served, role) for role in served.shapes)
    cache = prefill.cache
    tokens = 2 * prefill.block_size + 7
    manager = Manager(cache.config())
    manager.request("a", list(range(tokens)))
    assert manager.malloc("a", device_cache=False).success
    tags = [group.tag for group in cache.plan.groups]
    lists: Lists = dict(zip(tags, manager.rows("a")[0], strict=True))

    cut = all(group.block.heads for group in cache.plan.groups)  # else every rank holds the same
    pools = [written(cache, lists, rank if cut else 0) for rank in range(prefill.ranks)]
    before = [content(cache, each, lists) for each in pools]

    pairs = manager.fork("a", [0, 0])
    assert pairs
    for pair in pairs:
        ids = jnp.int32([pair.source]), jnp.int32([pair.target])
        pools = [data_plane.copy(each, cache, pair.tag, *ids)[0] for each in pools]
    forked: Lists = dict(zip(tags, manager.rows("a")[0], strict=True))
    assert forked != lists
    assert [content(cache, each, forked) for each in pools] == before

    kept = {
        group.tag: forked[group.tag]
        if group.policy.group_type is GroupType.FULL
        else forked[group.tag][-max(1, group.policy.active_tail_blocks) :]
        for group in cache.plan.groups
    }
    tails = [content(cache, each, kept) for each in pools]
    pools = [stored_and_retrieved(prefill, each, forked, tokens) for each in pools]
    assert [content(cache, each, kept) for each in pools] == tails

    received = [list(decode.cache.pools()) for _ in range(decode.ranks)]
    moves = plan_moves(prefill, decode, tokens, [forked] * prefill.ranks, [forked] * decode.ranks)
    carry(moves, [[np.asarray(pool) for pool in each] for each in pools], received)
    for group in cache.plan.groups:
        for layer in group.layers:
            sides = [
                [whole_parts(side, each, layer, group.tag, kept[group.tag]) for each in all_pools]
                for side, all_pools in ((cache, pools), (decode.cache, received))
            ]
            for part in sides[0][0]:
                found, wanted = (joined(group.block.heads, part, side) for side in sides)
                assert found == wanted, (layer, part)


def whole_parts(cache: PlannedCache, pools: Any, layer: int, tag: str, blocks: list[int]) -> dict[str, np.ndarray]:
    """Parts of some blocks on a rank, `[kernel blocks, heads, states, ...]`."""
    found = cache.layer_cache(layer, tag)
    rows = [block * found.kernel_blocks + j for block in blocks if block > 0 for j in range(found.kernel_blocks)]
    return {name: numpy_view(np.asarray(pools[found.pool]), view)[rows] for name, view in found.parts.items()}


def joined(heads: int, part: str, ranks: list[dict[str, np.ndarray]]) -> bytes:
    """A part of all ranks together, or that of each rank, which is the same, where there is nothing to split."""
    each = [rank[part] for rank in ranks]
    if not heads:
        assert len({array.tobytes() for array in each}) == 1
        return each[0].tobytes()
    if part == "conv":  # queries, keys and values of a rank's heads, side by side
        keys = (each[0].shape[-1] - 128 * (heads // len(ranks))) // 2
        thirds = [np.split(array, [keys, 2 * keys], axis=-1) for array in each]
        return b"".join(np.concatenate(third, axis=-1).tobytes() for third in zip(*thirds, strict=True))
    return np.concatenate(each, axis=3 if part == "state" else 1).tobytes()
