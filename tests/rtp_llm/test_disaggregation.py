"""Requests moved from prefill to decode servers of other shapes, and every byte of the target judged."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from hkv.dialects.rtp_llm import log as structs
from hkv.dialects.rtp_llm.disaggregation import Lists, Move, Server, arrived_tokens, carry, plan_moves
from hkv.dialects.rtp_llm.engines.numpy import RtpNumpyEngine
from hkv.dialects.rtp_llm.planned_cache import PlannedCache
from hkv.dialects.rtp_llm.planning import DescribedModel, RtpOptions
from hkv.dialects.rtp_llm.planning.descriptions import dsv4_descriptions, dsv4_layer_tags
from hkv.dialects.rtp_llm.transfers import tensor_parallel_peers
from hkv.errors import PlanError
from hkv.mesh.parallel_shape import ParallelShape
from hkv.mesh.resharding import Side, plan_resharding
from hkv.model.group_policy import GroupType, LayerDescription
from hkv.spec import MLAAttention
from reference.dialects.rtp_llm.shares import Whole
from tests.rtp_llm.described import attention, one, recurrent

SENTINEL = 0xA5
Pools = list[np.ndarray]


@dataclasses.dataclass(frozen=True)
class Kind:
    """A model with a draft module or none, and settings of every server."""

    model: DescribedModel
    draft: DescribedModel | None = None
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)

    def server(self, num_blocks: int = 24, **options: Any) -> Server:
        chosen = RtpOptions(**{"block_size": 8, **self.fields, **options})
        return Server(PlannedCache.of_layers(self.model, chosen, num_blocks=num_blocks, draft=self.draft), chosen)


def latent(sizes: tuple[int, int], dtype: str, indexer: int | None, count: int) -> DescribedModel:
    layer = one("default", MLAAttention(block_size=8, head_size=sum(sizes), dtype=dtype))
    return DescribedModel((layer,) * count, sizes, indexer)


FULL12 = attention(12, 4, "float8_e4m3fn")
SWA = attention(12, 2, "float8_e4m3fn")
STATE = recurrent("float32", heads=12)
V4 = dsv4_descriptions(head_dim=8, indexer_dim=4, float8=False)
KINDS = {
    "float8": Kind(DescribedModel((one("default", FULL12),) * 2)),
    "kernel blocks and drafts": Kind(
        DescribedModel((one("default", FULL12),) * 2),
        DescribedModel((one("default", FULL12),)),
        {"kernel_block_size": 4, "modules": 2},
    ),
    "latents and drafts": Kind(latent((128, 4), "float8_e4m3fn", None, 2), latent((128, 4), "float8_e4m3fn", None, 1)),
    "latents and an indexer": Kind(latent((6, 2), "bfloat16", 4, 2)),
    "states": Kind(DescribedModel((one("linear0", STATE), one("full", attention(12, 16, "bfloat16"))) * 2)),
    "windows": Kind(
        DescribedModel((one("swa", SWA, group_type=GroupType.SWA), one("full", FULL12))), None, {"pools": "independent"}
    ),
    "deepseek_v4": Kind(
        DescribedModel(
            tuple(LayerDescription(caches=tuple(V4[tag] for tag in dsv4_layer_tags(ratio))) for ratio in (128, 4, 0, 4))
        ),
        None,
        {"pools": "independent", "block_size": 256, "kernel_block_size": 128, "explicit_blocks": (("hca_state", 24),)},
    ),
}


def lists_of(server: Server, tokens: int, rank: int, seed: int) -> Lists:
    """Blocks of a request on a rank, drawn: every slot that it needs, windows and states with holes before."""
    rng = np.random.default_rng([seed, rank])
    keys = -(-tokens // server.block_size)
    taken: dict[int, list[int]] = {}
    found: dict[str, list[int]] = {}
    for index, group in enumerate(server.cache.plan.groups):
        compact = server.options.slicing_ranks if group.block.seq_size > server.block_size else 1
        full = group.policy.group_type is GroupType.FULL
        slots = -(-keys // (server.options.ranks if full else compact))
        pool = 0 if server.cache.plan.shared else index
        free = taken.setdefault(pool, list(rng.permutation(np.arange(1, group.num_blocks))))
        tail = slots if full else max(1, group.policy.active_tail_blocks)
        found[group.tag] = [-1 if slot < slots - tail else int(free.pop()) for slot in range(slots)]
    return found


def whole_of(kind: Kind, tokens: int, ranks: int) -> Whole:
    """The same model on one rank that holds everything, and its random content."""
    role = {"role": "decode", "prefill_ranks": ranks} if ranks > 1 else {}
    server = kind.server(**role)
    pools = [np.random.default_rng(7).integers(0, 256, size, np.uint8) for size in server.cache.pool_sizes]
    return Whole(server, pools, lists_of(server, tokens, 0, 99), tokens)


def fresh(server: Server) -> list[Pools]:
    return [[np.full(size, SENTINEL, np.uint8) for size in server.cache.pool_sizes] for _ in range(server.ranks)]


@dataclasses.dataclass
class Transfer:
    """A request on its way; lists are those of the source's ranks and of the target's."""

    lists: list[list[Lists]]
    source: Server
    target: Server
    moves: list[Move]
    sent: list[Pools]
    received: list[Pools]
    expected: list[Pools]


def transfer(
    kind: Kind,
    source: Server,
    target: Server,
    tokens: int,
    reused: int = 0,
    alike: bool = False,
    draw: Callable[[Server, int, int, int], Lists] = lists_of,
) -> Transfer:
    """Plans a transfer; `expected` is what the target's pools must be once all of it was carried out.

    With `alike`, all ranks of a server have one list.
    """
    whole = whole_of(kind, tokens, source.options.ranks)
    lists = [
        [draw(server, tokens, 0 if alike else rank, seed) for rank in range(server.ranks)]
        for seed, server in ((1, source), (2, target))
    ]
    sent, expected = fresh(source), fresh(target)
    for rank in range(source.ranks):
        whole.share(source, sent[rank], lists[0][rank], rank)
    for rank in range(target.ranks):
        whole.share(target, expected[rank], lists[1][rank], rank, reused)
    moves = plan_moves(source, target, tokens, lists[0], lists[1], reused=reused)
    return Transfer(lists, source, target, moves, sent, fresh(target), expected)


def judged(found: Transfer) -> bool:
    return all(
        np.array_equal(mine, wanted)
        for got, want in zip(found.received, found.expected, strict=True)
        for mine, wanted in zip(got, want, strict=True)
    )


def context(ranks: int) -> tuple[dict[str, Any], dict[str, Any]]:
    return {"ranks": ranks}, {"role": "decode", "prefill_ranks": ranks}


def tensor(prefill: int, decode: int) -> tuple[dict[str, Any], dict[str, Any]]:
    return {"role": "prefill", "tensor_parallel": prefill}, {"role": "decode", "tensor_parallel": decode}


SHAPES = {
    **{f"{p} to {d}": tensor(p, d) for p, d in ((4, 2), (2, 4), (2, 3), (3, 2), (1, 6), (12, 1), (8, 2))},
    "8 context ranks to 1": context(8),
    "2 context ranks to 1": context(2),
    "4 context ranks to 2": ({"ranks": 4}, {"role": "decode", "prefill_ranks": 4, "tensor_parallel": 2}),
}
DIVIDED = [name for name in SHAPES if "context" not in name]
CASES = [
    (kind, shape)
    for kind, shape in itertools.product(KINDS, SHAPES)
    if not (kind == "windows" and "context" in shape) and not (kind == "states" and shape == "8 to 2")
]


@pytest.mark.parametrize(("kind", "shape"), CASES)
@pytest.mark.parametrize("blocks", [Fraction(1, 4), Fraction(23, 4), 16])
def test_every_byte_arrives_where_it_belongs_and_no_other(kind: str, shape: str, blocks: Fraction) -> None:
    model = KINDS[kind]
    source, target = (model.server(**options) for options in SHAPES[shape])
    found = transfer(model, source, target, int(blocks * source.block_size))
    carry(found.moves, found.sent, found.received)
    assert judged(found)
    touched: set[tuple[int, int, int]] = set()
    for move in found.moves:
        rank, pool, start = move.target
        assert not touched & {(rank, pool, byte) for byte in (start, start + move.size - 1)}
        touched |= {(rank, pool, byte) for byte in (start, start + move.size - 1)}


def allocated(server: Server, tokens: int, rank: int, seed: int) -> Lists:
    """Blocks that a cache of the server's own configuration gives the second of two requests with one prompt."""
    config = server.cache.config(**({"cp_rank": rank} if server.options.ranks > 1 else {}))
    engine = RtpNumpyEngine(structs.to_rtp_header(config, "core"))
    for name in ("a", "b"):
        engine.perform(structs.RequestOp(id=name, tokens=[seed] * tokens))
        granted = engine.perform(structs.MallocOp(id=name))
        assert granted.verdict == "granted"
        assert (granted.reused == 0) or server.options.role == "prefill", "a decode server's cache comes from prefill"
        if name == "a":
            engine.perform(structs.InsertOp(id=name))
            engine.perform(structs.FreeOp(id=name))
    return dict(zip(config.topology.tags, engine.rows("b")[0], strict=True))


@pytest.mark.parametrize("shape", ["2 context ranks to 1", "8 context ranks to 1", "4 context ranks to 2"])
@pytest.mark.parametrize("blocks", [Fraction(1, 4), Fraction(23, 4), 9])
def test_managers_behind_sharded_prefill_have_a_slot_for_every_token(shape: str, blocks: Fraction) -> None:
    """Of every token and group, on the decode server: the slot that holds it, counted token by token; and its bytes."""
    kind = KINDS["deepseek_v4"]
    source, target = (kind.server(**options) for options in SHAPES[shape])
    tokens = int(blocks * source.block_size)
    found = transfer(kind, source, target, tokens, draw=allocated)
    for group in target.cache.plan.groups:
        stands_for = 256 * source.ranks if group.tag.endswith(("state", "swa_kv")) else 256
        slots, room = 0, 0
        for _ in range(tokens):
            slots, room = (slots + 1, stands_for - 1) if room == 0 else (slots, room - 1)
        for rank in range(target.ranks):
            listed = found.lists[1][rank][group.tag]
            assert len(listed) == slots, group.tag
            tail = slots if group.policy.group_type is GroupType.FULL else max(1, group.policy.active_tail_blocks)
            assert -1 not in listed[-tail:], group.tag
    carry(found.moves, found.sent, found.received)
    assert judged(found)


@pytest.mark.parametrize("shape", DIVIDED)
def test_blocks_that_the_target_has_are_not_sent_again(shape: str) -> None:
    model = KINDS["states"] if shape != "8 to 2" else KINDS["float8"]
    source, target = (model.server(**options) for options in SHAPES[shape])
    found = transfer(model, source, target, 45, reused=3)
    carry(found.moves, found.sent, found.received)
    assert judged(found)
    assert min(move.key for move in found.moves if move.tag in ("full", "default")) == 3


@pytest.mark.parametrize("shape", ["4 to 2", "2 to 4", "1 to 6", "12 to 1"])
def test_ranks_that_divide_each_other_pair_as_rtp_llm_pairs_them(shape: str) -> None:
    source, target = (KINDS["float8"].server(**options) for options in SHAPES[shape])
    found = transfer(KINDS["float8"], source, target, 40)
    pairs = {(move.source[0], move.target[0]) for move in found.moves}
    peers = {
        (rank, peer.server): peer
        for rank in range(source.ranks)
        for peer in tensor_parallel_peers(source.ranks, target.ranks, rank)
    }
    assert pairs == set(peers)
    for (rank, server), peer in peers.items():
        of_pair = [move for move in found.moves if (move.source[0], move.target[0]) == (rank, server)]
        for cache, ends, (count, index) in (
            (source.cache, [move.source for move in of_pair], peer.local),
            (target.cache, [move.target for move in of_pair], peer.remote),
        ):
            stride = cache.plan.groups[0].stride
            blocks = {start // stride for _, _, start in ends if start < 2 * 24 * stride}
            spans = [span for at in blocks for span in cache.addresses.parts(at // 24, at % 24, count, index)]
            whole = {span.offset + byte for span in spans for byte in range(span.size)}
            moved = {
                start + byte for (_, _, start), move in zip(ends, of_pair, strict=True) for byte in range(move.size)
            }
            assert moved == whole


@pytest.mark.parametrize(
    ("kind", "shape"),
    [("float8", "4 to 2"), ("float8", "2 to 3"), ("states", "4 to 2"), ("deepseek_v4", "2 context ranks to 1")],
)
def test_of_a_lost_source_rank_nothing_wrong_is_read(kind: str, shape: str) -> None:
    """In whatever order moves come, the tokens that the target may go on from are all there."""
    model = KINDS[kind]
    source, target = (model.server(**options) for options in SHAPES[shape])
    tokens = 5 * source.block_size + 3
    found = transfer(model, source, target, tokens)
    rng = np.random.default_rng(5)
    for lost in range(source.ranks):
        order = list(rng.permutation(len(found.moves)))
        last = int(rng.integers(0, len(order)))
        done = [at for place, at in enumerate(order) if place < last or found.moves[at].source[0] != lost]
        found.received = fresh(target)
        carry([found.moves[at] for at in done], found.sent, found.received)
        usable = arrived_tokens(target, tokens, found.moves, done)
        assert 0 <= usable <= tokens
        assert (usable == tokens) == (len(done) == len(found.moves))
        for move in found.moves:
            if move.key < -(-usable // target.block_size):
                rank, pool, start = move.target
                stop = start + move.size
                assert np.array_equal(found.received[rank][pool][start:stop], found.expected[rank][pool][start:stop])
    every = range(len(found.moves))
    assert arrived_tokens(target, tokens, found.moves, every) == tokens
    of_group = {(move.layer, move.tag): at for at, move in enumerate(found.moves)}
    for last in of_group.values():
        assert arrived_tokens(target, tokens, found.moves, set(every) - {last}) < tokens


@pytest.mark.parametrize("shape", ["4 to 2", "2 to 4", "3 to 2", "12 to 1"])
def test_resharding_moves_the_same_bytes(shape: str) -> None:
    """`hkv.mesh`'s plans, which know layouts alone, of RTP-LLM's pages."""
    model = KINDS["kernel blocks and drafts"]
    source, target = (model.server(**options) for options in SHAPES[shape])
    tokens = 40
    found = transfer(model, source, target, tokens, alike=True)
    rows = [tuple(lists[0]["default"]) for lists in found.lists]
    for pages, others in zip(source.cache.pages["default"], target.cache.pages["default"], strict=True):
        for layout, other in zip(pages.layouts, others.layouts, strict=True):
            sides = [
                Side(shape=ParallelShape(heads=12, tensor=server.ranks), layout=each, row=row, null_block=-1)
                for server, each, row in ((source, layout, rows[0]), (target, other, rows[1]))
            ]
            plan = plan_resharding(*sides, range(tokens), replicas="direct")
            for move, layer in itertools.product(plan.sends, plan.layers):
                for run in plan.byte_runs(move, layer):
                    there = found.received[move.target.tensor][0][run.target : run.target + run.count]
                    there[:] = found.sent[move.source.tensor][0][run.source : run.source + run.count]
    assert judged(found)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"kernel_block_size": 4}, "groups of the source's tags"),
        ({"role": "prefill", "ranks": 2}, "whose ranks deal no blocks out"),
        ({"role": "decode", "prefill_ranks": 4}, "1, the ranks of the source"),
    ],
)
def test_servers_that_do_not_fit_each_other(change: dict[str, Any], says: str) -> None:
    kind = KINDS["float8"]
    source, target = kind.server(), kind.server(**change)
    with pytest.raises(PlanError, match=says):
        plan_moves(source, target, 8, [{"default": [1]}], [{"default": [1]}] * target.ranks)
    with pytest.raises(PlanError, match="a block at 0"):
        plan_moves(source, source, 8, [{"default": [1]}], [{"default": [-1]}])
