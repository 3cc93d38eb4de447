"""A decoder with a hybrid cache inside `jit` computes what it computes without a cache, to the bit."""

from __future__ import annotations

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.hybrid_decoder import loop
from examples.hybrid_decoder.loop import COUNTS
from examples.hybrid_decoder.model import KINDS, Model
from examples.hybrid_decoder.plain import without_cache
from examples.hybrid_decoder.serving import Decoder, Request
from hkv.cache.state import StepCounter, replace
from hkv.errors import ConfigError, OperationError

SMALL = Model(layers=KINDS, head=8, delta_heads=1, longest=48, vocabulary=32, exact=True)
BLOCKS = 71
ULPS = 64
"""Of the largest logit: what sums in another order may differ by."""


def expected(decoder: Decoder, request: Request) -> np.ndarray:
    """The logits of every token but the last by the pass without a cache, which knows no blocks."""
    model = dataclasses.replace(decoder.model, block=4, blocks=())
    tokens = np.zeros(model.longest, np.int32)
    tokens[: len(request.tokens)] = request.tokens
    return np.asarray(without_cache(model, decoder.weights, jnp.array(tokens)))[: len(request.tokens) - 1]


def counted(decoder: Decoder) -> dict[str, int]:
    return dict(zip(COUNTS, np.asarray(decoder.carry.counts).tolist(), strict=True))


@dataclasses.dataclass
class Round:
    """Requests that were served, the preemptions that took, and the counts up to then."""

    requests: list[Request]
    preempted: int
    counts: dict[str, int]


def served(decoder: Decoder, prompts: list[list[int]], *targets: int) -> Round:
    requests = [Request(list(prompt), target) for prompt, target in zip(prompts, targets, strict=True)]
    return Round(requests, decoder.serve(requests), counted(decoder))


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    """Chunks and drafts of up to four tokens, in one program that watches itself."""
    return Decoder(SMALL, 3, BLOCKS, chunk=4, drafts=3, keep_logits=True, audited=True)


@pytest.fixture(scope="module")
def rounds(decoder) -> list[Round]:
    """Prompts A, B, A again; A's sequence with another end; all of them to the full length; A once more."""
    draw = np.random.default_rng(1)
    first, second = ([draw.integers(0, 32, length).tolist() for length in lengths] for lengths in ((9, 14), (11,)))
    found = [served(decoder, first, 20, 24), served(decoder, second, 20), served(decoder, first, 20, 24)]
    sequences = [request.tokens for one in found[:2] for request in one.requests]
    found.append(served(decoder, [[*sequences[1][:22], 1, 2]], 30))
    found.append(served(decoder, sequences, 46, 46, 46))
    found.append(served(decoder, first, 20, 24))
    return found


def test_every_logit_is_the_one_of_the_pass_without_a_cache_to_the_bit(decoder, rounds):
    for one in rounds:
        for request in one.requests:
            exact = expected(decoder, request)
            assert request.logits is not None
            computed = request.logits[min(request.hits) : len(exact)]
            np.testing.assert_array_equal(computed.view(np.uint32), exact[min(request.hits) :].view(np.uint32))


def test_sequences_exceed_every_window_and_chunk_threefold(rounds):
    longest = max(len(request.tokens) for one in rounds for request in one.requests)
    assert longest > 3 * max(SMALL.window, SMALL.chunk)


def test_what_the_cache_does_has_happened(decoder, rounds):
    hits = [[request.hits for request in one.requests] for one in rounds]
    assert hits[0] == [[0], [0]]
    assert all(hit > 0 for [hit] in hits[2]), "A, B, A: the second time A is found"
    [[inside]] = hits[3]
    assert inside % SMALL.window, "a hit in the middle of a window"
    assert inside % SMALL.chunk, "and of a chunk"
    assert inside > 2 * SMALL.window
    assert rounds[4].preempted > 0
    assert any(len(request.hits) > 1 for request in rounds[4].requests), "one returned"
    assert int(decoder.carry.cache.counters[StepCounter.EVICTIONS]) > 0
    assert rounds[-1].counts["refused"] > 0
    assert 0 < rounds[-1].counts["accepted"] < rounds[-1].counts["drafted"], "drafts stayed, and drafts were rejected"


def test_the_same_prompt_gives_the_same_tokens_whatever_is_cached(rounds):
    tokens = [[request.tokens for request in rounds[index].requests] for index in (0, 2, 5)]
    assert tokens[0] == tokens[1] == tokens[2]


def test_no_read_was_wrong(rounds):
    assert rounds[-1].counts["wrong"] == 0


def test_the_watch_sees_a_wrong_block_and_so_do_the_logits(decoder, rounds):
    request, before = Request(rounds[1].requests[0].tokens[:9], 20), counted(decoder)["wrong"]
    decoder.arrive({0: request})
    assert decoder.run() == []
    cache, rows = decoder.carry.cache, decoder.carry.rows
    table = np.array(cache.rows)
    table[0, 0, 1] = table[0, 0, 0]
    target = jnp.array([30, 0, 0], jnp.int32)
    changed = {"cache": replace(cache, rows=jnp.array(table)), "rows": rows._replace(target=target)}
    decoder.carry = decoder.carry._replace(**changed)
    assert decoder.run() == []
    decoder.collect(0, request)
    decoder.finish([0])
    assert counted(decoder)["wrong"] > before
    assert request.logits is not None
    assert (request.logits[20:29] != expected(decoder, request)[20:]).any()


def test_local_kinds_hold_less_than_full_ones(decoder, rounds):
    held = dict(zip(KINDS, np.asarray(decoder.carry.held).tolist(), strict=True))
    assert held["window"] < held["full"]
    assert held["chunked"] < held["full"]
    assert held["delta"] < held["full"]
    assert held["full"] == held["mla"]


@pytest.fixture(scope="module")
def plain_program():
    """A decoder that does not watch itself, with larger blocks for some kinds, one token a turn."""
    model = dataclasses.replace(SMALL, exact=False, blocks=(("window", 8), ("chunked", 8), ("delta", 8)))
    return Decoder(model, 2, 73, chunk=1, order="BLHNC", keep_logits=True)


@pytest.fixture(scope="module")
def split_program():
    """Chunks of seven tokens, two drafts, and pages that kernels see in halves."""
    model = dataclasses.replace(SMALL, exact=False, layers=("window", "mla", "full"))
    return Decoder(model, 2, 73, chunk=7, drafts=2, order="BLNHC", kernel_block=2, keep_logits=True)


@pytest.mark.parametrize("name", ["plain_program", "split_program"])
def test_other_layouts_blocks_and_chunks_differ_by_rounding_alone(name, request):
    decoder = request.getfixturevalue(name)
    draw = np.random.default_rng(2)
    prompts = [draw.integers(0, 32, length).tolist() for length in (19, 10)]
    found = served(decoder, prompts, 44, 44)
    again = served(decoder, [[*one.tokens[:33], 3] for one in found.requests], 44, 44)
    for one in (*found.requests, *again.requests):
        exact = expected(decoder, one)
        assert one.logits is not None
        computed = one.logits[min(one.hits) : len(exact)]
        spacing = np.spacing(np.abs(exact).max())
        assert np.abs(computed - exact[min(one.hits) :]).max() <= ULPS * spacing
    assert all(one.hits[0] > 0 for one in again.requests)


def pool_sized(text: str, size: int) -> list[str]:
    """Instructions that make an array of the pool's size, but for scatters into it and views of it."""
    found = []
    for line in text.splitlines():
        match = re.search(r"%([\w.-]+) = u32\[([\d,]+)\]\S* ([\w-]+)\(", line)
        if match and math.prod(int(extent) for extent in match[2].split(",")) == size:
            viewed = match[3] in ("parameter", "get-tuple-element", "bitcast", "scatter")
            found += [] if viewed or "scatter" in match[1] else [line.strip()]
    return found


def test_the_loop_copies_no_pool_and_calls_no_host(plain_program, split_program):
    for decoder, decoding in ((plain_program, True), (split_program, True), (split_program, False)):
        text = decoder.program(decoding).as_text()
        assert pool_sized(text, decoder.carry.pool.size) == []
        assert not re.search(r"callback|\b(infeed|outfeed|send|recv)\(", text)
        assert " while(" in text


def test_the_search_for_copies_finds_one(plain_program):
    pool = plain_program.carry.pool
    text = jax.jit(lambda pool: (pool, pool.at[0].set(1))).lower(pool).compile().as_text()
    assert pool_sized(text, pool.size)


def test_everything_carried_is_changed_in_place(plain_program):
    memory = plain_program.program(True).memory_analysis()
    carried = sum(leaf.nbytes for leaf in jax.tree.leaves(plain_program.carry))
    assert memory.alias_size_in_bytes > 0.99 * carried
    assert memory.output_size_in_bytes <= memory.alias_size_in_bytes + 4096


def test_memory_does_not_grow_with_the_steps_of_a_loop():
    decoder = Decoder(dataclasses.replace(SMALL, exact=False, layers=("window",)), 2, 73, chunk=1)

    def memory(steps: int):
        def run(parameters, weights, carry):
            body = lambda carry, _: (loop.turn(decoder.plan, True, parameters, weights, carry), None)  # noqa: E731
            return jax.lax.scan(body, carry, length=steps)[0]

        arguments = (decoder.parameters, decoder.weights, decoder.carry)
        return jax.jit(run, donate_argnums=2).lower(*arguments).compile().memory_analysis()

    few, many = memory(8), memory(32)
    assert few.temp_size_in_bytes == many.temp_size_in_bytes
    assert few.output_size_in_bytes == many.output_size_in_bytes


def test_a_request_that_never_fits_is_refused(plain_program):
    with pytest.raises(OperationError, match="target"):
        plain_program.arrive({0: Request([1] * 10, 99)})
    with pytest.raises(ConfigError, match="drafts"):
        Decoder(SMALL, 1, 20, chunk=2, drafts=2)
