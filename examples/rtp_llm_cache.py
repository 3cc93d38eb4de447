"""RTP-LLM's cache of a model from its config to bytes: a request's pages written, forked, moved to other ranks, judged.

Every judge has a line that says how much it compared; the command ends with 1 if anything differed, with 2 for a model
that RTP-LLM has no size for.

Example: python examples/rtp_llm_cache.py tests/data/models/qwen3_next.json --prefill 2 --decode 1
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from hkv.dialects.rtp_llm import data_plane
from hkv.dialects.rtp_llm import log as structs
from hkv.dialects.rtp_llm.disaggregation import Lists, Server, carry, plan_moves
from hkv.dialects.rtp_llm.engines.numpy import RtpNumpyEngine
from hkv.dialects.rtp_llm.planned_cache import PlannedCache
from hkv.dialects.rtp_llm.planning import DescribedModel, RtpOptions, describe_model, served_options
from hkv.errors import HKVError
from hkv.layout.views.numpy import view
from hkv.model.group_policy import GroupType
from hkv.model.huggingface import load_config, read_model
from reference.dialects.rtp_llm import data_plane as loops
from reference.dialects.rtp_llm.shares import Whole

BLOCKS, ROOM = 2.5, 24
"""Blocks of the prompt, and of each pool."""

LAYERS = 2
"""Layers of each kind that are filled: those of one kind lie one like the other."""

Pools = list[np.ndarray]
Judged = Iterator[tuple[str, str, bool]]
"""A judge's name, what it compared, and whether all of it was as it has to be."""


def described(path: str, pools: str | None) -> tuple[DescribedModel, RtpOptions]:
    """The first layers of each kind of a model, and settings with which RTP-LLM can serve it."""
    model = read_model(load_config(path))
    asked = RtpOptions(pools=pools or "shared")
    options, _ = served_options(model, asked, {"pools"} if pools else ())
    whole, seen = describe_model(model, options), dict[tuple[str, ...], int]()
    layers = []
    for layer in whole.layers:
        tags = tuple(cache.tag for cache in layer.caches)
        seen[tags] = seen.get(tags, 0) + 1
        layers += [layer] * (seen[tags] <= LAYERS)
    return dataclasses.replace(whole, layers=tuple(layers)), options


def request(server: Server, tokens: int, rank: int = 0) -> tuple[RtpNumpyEngine, Lists]:
    """A cache of a rank's blocks, and the blocks that it gives a prompt; block ids differ from rank to rank."""
    config = server.cache.config(**({"cp_rank": rank} if server.options.ranks > 1 else {}))
    engine = RtpNumpyEngine(structs.to_rtp_header(config, "core"))
    engine.perform(structs.RequestOp(id="a", tokens=[7] * tokens))
    answer: Any = engine.perform(structs.MallocOp(id="a", device_cache=False))
    if answer.verdict != "granted":
        sys.exit("no room for the prompt")
    return engine, held(server, engine)


def held(server: Server, engine: RtpNumpyEngine) -> Lists:
    """Blocks of the first sequence, by the groups' tags."""
    return dict(zip(server.cache.config().topology.tags, engine.rows("a")[0], strict=True))


def filled(server: Server, lists: Lists, tokens: int) -> Whole:
    """A rank that holds all of a request, drawn element by element; padding stays as it is."""
    random, pools = np.random.default_rng(0), list(server.cache.pools())
    for group in server.groups:
        blocks = [block for block in lists[group.tag] if block > 0]
        for layer in group.layers:
            found = server.cache.layer_cache(layer, group.tag)
            for part in found.parts.values():
                mine = view(pools[found.pool], part)
                rows = [block * found.kernel_blocks + row for block in blocks for row in range(found.kernel_blocks)]
                drawn = random.integers(0, 256, mine[rows].nbytes, np.uint8)
                mine[rows] = drawn.view(mine.dtype).reshape(mine[rows].shape)
    return Whole(server, pools, lists, tokens)


def tails(server: Server, lists: Lists) -> Lists:
    """Blocks that a prefill server stores: all of full groups, of others those that the next token reads."""
    found = {tag: list(blocks) for tag, blocks in lists.items()}
    for group in server.groups:
        if group.policy.group_type is not GroupType.FULL:
            before = max(0, len(found[group.tag]) - max(1, group.policy.active_tail_blocks))
            found[group.tag][:before] = [-1] * before
    return found


def scattered(server: Server, lists: Lists, wanted: Pools) -> data_plane.Pools:
    """A rank's pools on the device, the parts of its pages written by the compiled data plane."""
    pools = data_plane.on_device(server.cache)
    for group in server.groups:
        blocks = [block for block in lists[group.tag] if block > 0]
        for layer in group.layers:
            found = server.cache.layer_cache(layer, group.tag)
            values = {}
            for name, part in found.parts.items():
                # [blocks * kernel blocks, heads, states, ...] as tokens of heads
                rows = [block * found.kernel_blocks + row for block in blocks for row in range(found.kernel_blocks)]
                mine = np.moveaxis(view(wanted[found.pool], part)[rows], 2, 1)
                values[name] = mine.reshape(-1, *mine.shape[2:])
            pools, _ = data_plane.scatter(pools, server.cache, layer, group.tag, jnp.int32(blocks), values)
    return pools


def same(found: Sequence[Sequence[Any]], wanted: Sequence[Pools]) -> tuple[str, bool]:
    """Number of bytes compared, and whether all are equal: those that nothing should have changed too."""
    pairs = [pair for mine, theirs in zip(found, wanted, strict=True) for pair in zip(mine, theirs, strict=True)]
    text = f"{sum(theirs.nbytes for _, theirs in pairs):,} bytes of {len(found)} rank{'s' * (len(found) > 1)}"
    return text, all(np.array_equal(np.asarray(mine), theirs) for mine, theirs in pairs)


def judged(model: DescribedModel, options: RtpOptions, prefill: int, decode: int, *, dealt: bool) -> Judged:
    """Follows one prompt through a prefill server to a decode server.

    Args:
      model: its layers.
      options: settings of every server.
      prefill: ranks of the prefill server.
      decode: ranks of the decode server.
      dealt: the prefill ranks deal blocks out (context parallelism), else they split heads.
    """

    def server(**fields: Any) -> Server:
        chosen = dataclasses.replace(options, **fields)
        return Server(PlannedCache.of_layers(model, chosen, num_blocks=ROOM), chosen)

    behind = {"prefill_ranks": prefill} if dealt else {}
    split = {"ranks": prefill} if dealt else {"tensor_parallel": prefill}
    source, target = server(role="prefill", **split), server(role="decode", tensor_parallel=decode, **behind)
    tokens = int(BLOCKS * (source.block_size * (prefill if dealt else 1)))
    alone = server(role="decode", **behind)
    whole = filled(alone, request(alone, tokens)[1], tokens)

    engines, lists = map(list, zip(*(request(source, tokens, rank) for rank in range(source.ranks)), strict=True))
    wanted = [list(source.cache.pools()) for _ in lists]
    for rank, mine in enumerate(wanted):
        whole.share(source, mine, lists[rank], rank)
    pools = [scattered(source, each, mine) for each, mine in zip(lists, wanted, strict=True)]
    yield "pages written by parts", *same(pools, wanted)

    for rank, engine in enumerate(engines):
        forked: Any = engine.perform(structs.ForkOp(id="a", sources=[0, 0]))
        for tag, old, new in forked.copies or sys.exit("no room for a fork"):
            pools[rank], _ = data_plane.copy(pools[rank], source.cache, tag, jnp.int32([old]), jnp.int32([new]))
            loops.copy(wanted[rank], source.cache, tag, [old], [new])
    yield "blocks copied for a fork", *same(pools, wanted)

    lists = [held(source, engine) for engine in engines]
    theirs = [request(target, tokens)[1] for _ in range(target.ranks)]
    moves = plan_moves(source, target, tokens, lists, theirs)
    expected = [list(target.cache.pools()) for _ in theirs]
    stored = Whole(alone, whole.pools, tails(alone, whole.lists), tokens)
    for rank, mine in enumerate(expected):
        stored.share(target, mine, theirs[rank], rank)
    received = [list(target.cache.pools()) for _ in theirs]
    carry(moves, [list(map(np.asarray, each)) for each in pools], received)
    compared, equal = same(received, expected)
    yield "pages moved to decode", f"{compared}, {len(moves):,} moves", equal
    full = [group for group in target.groups if group.policy.group_type is GroupType.FULL]
    slots = itertools.product(full, theirs)
    yield (
        "slots for every token",
        f"{tokens:,} tokens",
        all(len(each[group.tag]) * group.block.seq_size >= tokens for group, each in slots),
    )


def main(arguments: Sequence[str]) -> int:
    """Judges one model; 0 if nothing differed, 1 if something did, 2 for a model without a size."""
    parser = argparse.ArgumentParser(description="Follow a request through RTP-LLM's cache of a model.")
    parser.add_argument("config", help="a config.json, its folder, or a released model by name")
    parser.add_argument(
        "--pools", choices=("shared", "independent"), help="left out, what the model can be served with"
    )
    parser.add_argument("--prefill", type=int, default=2, metavar="N", help="ranks of the prefill server (2)")
    parser.add_argument("--decode", type=int, default=1, metavar="N", help="ranks of the decode server (1)")
    parser.add_argument("--context", action="store_true", help="the prefill ranks deal blocks out, and split no heads")
    given = parser.parse_args(arguments)
    try:
        model, options = described(given.config, given.pools)
        cache, differs = PlannedCache.of_layers(model, options, num_blocks=ROOM), False
        for group in cache.plan.groups:
            found = cache.layer_cache(group.layers[0], group.tag)
            print(f"{group.tag}: {found.kv.shape} of {found.kv.dtype}, parts {', '.join(found.parts)}")
        for name, compared, equal in judged(model, options, given.prefill, given.decode, dealt=given.context):
            print(f"{'equal  ' if equal else 'DIFFERS'}  {name}: {compared}")
            differs |= not equal
    except HKVError as error:
        print(f"refused: {error}", file=sys.stderr)
        return 2
    return int(differs)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
