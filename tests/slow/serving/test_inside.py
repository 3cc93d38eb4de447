"""Hits that end inside blocks, served: blocks are copied before they are written, and every token is the model's."""

from __future__ import annotations

import numpy as np
import pytest

import hkv
from hkv.errors import ConfigError
from hkv.model.topology import Group
from tests.cache.build import large_copies
from tests.serving.test_serving import LONGEST, VOCABULARY, WIDTH, WINDOW, Host, R, check, serve

PROMPTS = [np.random.default_rng(n).integers(0, VOCABULARY, size).tolist() for n, size in ((1, 11), (2, 15), (3, 7))]


def config(num_blocks: int = 60, prefix_match_unit: int | None = 2):
    """The layers of `tests.serving.test_serving` in blocks of two hash blocks, of one, and of four."""
    full = hkv.FullAttention(block_size=4, num_kv_heads=1, head_size=WIDTH, dtype="float32")
    window = hkv.SlidingWindow(block_size=2, num_kv_heads=1, head_size=WIDTH, dtype="float32", window=WINDOW)
    state = hkv.Mamba(block_size=8, shapes=((WIDTH,),), dtypes=("float32",))
    named = ((full, ("full",)), (window, ("near", "nearer")), (state, ("state",)))
    groups = tuple(Group(tag=layers[0], spec=spec, layers=layers) for spec, layers in named)
    return hkv.cache_config(
        hkv.Topology(groups=groups), num_blocks, max_model_len=LONGEST, prefix_match_unit=prefix_match_unit
    )


def test_tokens_are_those_without_a_cache_through_hits_inside_blocks():
    """Prompts come again after, and while, their first request goes on; some of them in a row that was preempted."""
    host = Host(config())
    for prompt, last in zip(PROMPTS, (10, 14, 6), strict=True):
        assert host.arrive(0, prompt, len(prompt) + 1) == 0
        host.run()
        assert host.arrive(1, prompt, len(prompt) + 5) == last
        host.targets[0] += 6
        host.run()
        assert host.arrive(2, prompt, len(prompt) + 7) == last
        host.run()
        for row in range(3):
            check(host.tokens(row), len(prompt))
            host.leave(row)


class Leaving(Host):
    """Requests that give back their blocks as soon as others need them."""

    def __init__(self, made) -> None:
        super().__init__(made)
        self.done: list[list[int]] = []

    def arrive(self, row: int, tokens: list[int], target: int) -> int:
        for other in range(R) if self.preempted else ():
            if self.known[other] == self.targets[other] > 0:
                self.done.append(self.tokens(other))
                self.leave(other)
        return super().arrive(row, tokens, target)


def test_tokens_are_those_without_a_cache_where_blocks_run_out():
    host = Leaving(config(num_blocks=27))
    for row, prompt in enumerate(PROMPTS):
        host.arrive(row, prompt, len(prompt) + 12)
    host.run()
    texts = [*host.done, *(host.tokens(row) for row in range(R) if host.known[row])]
    assert len(texts) == R
    for text in texts:
        check(text, len(text) - 12)
    assert host.preempted
    assert int(host.served.cache.evictions)


def test_copies_are_made_in_place():
    """No array of the pool's size is copied in the loop, copies of blocks included."""
    host = Host(config(), debug=False)
    lowered = serve.lower(host.served, host.history, host.known, host.arrived, host.targets)
    copied = large_copies(lowered.compile().as_text(), host.served.pool.size)
    assert [line for line in copied if " scatter(" not in line] == []


def test_a_unit_inside_which_no_group_can_resume_is_refused():
    specs = [hkv.FullAttention(block_size=4), hkv.SlidingWindow(block_size=4, window=6)]
    with pytest.raises(ConfigError, match="prefix_match_unit = 2"):
        hkv.cache_config(hkv.Topology.of_specs(specs), 20, prefix_match_unit=2)
