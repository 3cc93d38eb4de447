"""RTP-LLM's cache from a config to bytes: plan, pools, a request's pages written, forked, moved to other ranks, read.

Example: python examples/rtp_llm_cache.py tests/data/models/qwen3_next.json
"""

from __future__ import annotations

import dataclasses
import itertools
import sys

import jax.numpy as jnp
import numpy as np

from hkv.dialects.rtp_llm import data_plane
from hkv.dialects.rtp_llm.disaggregation import Server, carry, plan_moves
from hkv.dialects.rtp_llm.planned_cache import PlannedCache
from hkv.dialects.rtp_llm.planning import RtpOptions, describe_model
from hkv.layout.views.numpy import numpy_dtype, view
from hkv.model.huggingface import ReadOptions, load_config, read_model
from reference.dialects.rtp_llm.manager import Manager

BLOCK, PROMPT = 1024, 2500


def serve(path: str, role: str, ranks: int) -> Server:
    """A server of a model's first layers, its heads split over ranks, with room for 9 blocks."""
    options = RtpOptions(block_size=BLOCK, role=role, tensor_parallel=ranks)
    model = describe_model(read_model(load_config(path), ReadOptions(block_size=BLOCK)), options)
    few = dataclasses.replace(model, layers=model.layers[:8])
    return Server(PlannedCache.of_layers(few, options, num_blocks=10), options)


def sum_of(cache: PlannedCache, pools: list[np.ndarray], lists: dict[str, list[int]]) -> int:
    """A sum over all bytes of a request, whatever blocks they are in."""
    total = 0
    for found in (found for layer in range(8) for found in cache.layer_cache_groups(layer)):
        for part in found.parts.values():
            blocks = view(pools[found.pool], part)[lists[found.tag]]
            total += int(np.frombuffer(blocks.tobytes(), np.uint8).sum(dtype=np.int64))
    return total


def main(path: str) -> None:
    """Follows one prompt through a prefill server of two ranks to a decode server of one."""
    prefill, decode = serve(path, "prefill", 2), serve(path, "decode", 1)
    for group in (cache := prefill.cache).plan.groups:
        found = cache.layer_cache(group.layers[0], group.tag)
        print(f"{group.tag}: {len(group.layers)} layers, {found.kv.shape} of {found.kv.dtype}, parts {[*found.parts]}")

    manager = Manager(cache.config())
    manager.request("a", [7] * PROMPT)
    manager.malloc("a", device_cache=False)
    lists = dict(zip(cache.config().topology.tags, manager.rows("a")[0], strict=True))
    print("blocks", lists)
    random, pools = np.random.default_rng(0), [data_plane.on_device(cache) for _ in range(prefill.ranks)]
    for rank, layer in itertools.product(range(prefill.ranks), range(8)):
        tag, values = (found := cache.layer_cache(layer)).tag, {}
        for name, part in found.parts.items():
            shape = (len(lists[tag]) * part.shape[2], part.shape[1], *part.shape[3:])
            values[name] = random.standard_normal(shape).astype(numpy_dtype(part.dtype))
        pools[rank], _ = data_plane.scatter(pools[rank], cache, layer, tag, jnp.int32(lists[tag]), values)
    sent = [list(map(np.array, each)) for each in pools]
    for pair in manager.fork("a", [0, 0]) or sys.exit("no room for a fork"):
        ids = jnp.int32([pair.source]), jnp.int32([pair.target])
        pools = [data_plane.copy(each, cache, pair.tag, *ids)[0] for each in pools]
    forked = dict(zip(lists, manager.rows("a")[0], strict=True))
    after = [list(map(np.array, each)) for each in pools]
    same = all(sum_of(cache, b, forked) == sum_of(cache, a, lists) for a, b in zip(sent, after, strict=True))
    print("the fork", forked, "has the same pages:", same)

    moves = plan_moves(prefill, decode, PROMPT, [forked] * prefill.ranks, [forked])
    carry(moves, after, received := [list(decode.cache.pools())])
    tails = {tag: blocks if tag == "full" else blocks[-1:] for tag, blocks in forked.items()}
    stored = sum(sum_of(cache, each, tails) for each in after)
    print(f"{len(moves)} moves to one rank, all there: {sum_of(decode.cache, received[0], tails) == stored}")


if __name__ == "__main__":
    main(sys.argv[1])
