"""No chunking, however hostile, makes a row read a state or a token that is not its own: a model in pages is the judge.

The model is the smallest one whose every output names all that was read: a recurrent layer's state is a hash of all
tokens so far, and an attention layer's token is the hash of the prefix that it ends.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import hkv
from hkv.cache.cache import Cache
from hkv.state.status import Status

R, P, T, W, BLOCKS = 3, 40, 14, 24, 40
SPECS = {
    "mamba": lambda size: hkv.Mamba(block_size=size),
    "full": lambda size: hkv.FullAttention(block_size=size),
    "window": lambda size: hkv.SlidingWindow(block_size=size, window=5),
    "opaque": lambda size: hkv.OpaqueState(block_size=size),
}


def prefix_hash(tokens: list[int]) -> int:
    """A number for tokens in their order; 1 for none."""
    state = 1
    for token in tokens:
        state = (state * 1_000_003 + token + 7) % (1 << 61)
    return state


class Served:
    """Rows of requests, and the pages in which the model keeps its states and tokens."""

    def __init__(self, config) -> None:
        self.specs = config.topology.specs
        self.sizes = config.block_sizes
        self.cache: Cache = hkv.init(config, rows=R, row_blocks=W)
        self.tokens: list[list[int]] = [[] for _ in range(R)]
        self.hits = [0] * R
        self.states: dict[tuple[int, int], int] = {}
        self.slots: dict[tuple[int, int, int], int] = {}

    def arrive(self, row: int, prompt: list[int]) -> int:
        padded = np.zeros((1, P), np.int32)
        padded[0, : len(prompt)] = prompt
        self.cache, found = hkv.arrive(self.cache, jnp.array([row]), padded, jnp.array([len(prompt)]))
        assert found.status[0] == Status.OK
        self.hits[row] = int(found.hits[0])
        self.tokens[row] = prompt[: self.hits[row]]
        return self.hits[row]

    def step(self, new: list[list[int]]) -> list[int]:
        """Computes with the model what the cache grants; every value that it reads must be the row's own."""
        flat = np.array([token for chunk in new for token in chunk], np.int32)
        ends = np.cumsum([0, *(len(chunk) for chunk in new)])
        self.cache, result = hkv.step(self.cache, np.pad(flat, (0, R * T - len(flat))), ends)
        result, tables = jax.device_get((result, self.cache.tables))
        self.copy([] if result.copies is None else result.copies)
        for row, chunk in enumerate(new):
            if chunk and result.status[row] == Status.OK:
                self.compute(row, chunk, result, int(ends[row]), tables[row])
        return result.status.tolist()

    def copy(self, copies) -> None:
        """Makes a step's copies: of states, and of as many slots as there are of each block."""
        for pairs in copies:
            for group, (block, copy) in enumerate(pairs.tolist()):
                if (group, block) in self.states:
                    self.states[group, copy] = self.states[group, block]
                for offset in range(self.sizes[group]):
                    if (group, block, offset) in self.slots:
                        self.slots[group, copy, offset] = self.slots[group, block, offset]

    def compute(self, row: int, chunk: list[int], result, start: int, tables) -> None:
        before, after = len(self.tokens[row]), [*self.tokens[row], *chunk]
        for group, spec in enumerate(self.specs):
            if spec.snapshot or spec.one_block:
                read, write = int(result.reads[row, group]), int(result.writes[row, group])
                state = self.states[group, read] if read else 1
                # An opaque region is never shared: what a hit passes over, it has not seen.
                assert state == prefix_hash(after[self.hits[row] if spec.one_block else 0 : before])
                for token in chunk:
                    state = (state * 1_000_003 + token + 7) % (1 << 61)
                self.states[group, write] = state
                continue
            for place in range(len(chunk)):
                block, offset = result.blocks[group, start + place], result.offsets[group, start + place]
                slot = (group, int(block), int(offset))
                self.slots[slot] = prefix_hash(after[: before + place + 1])
            size = self.sizes[group]
            for span in spec.reads(before):
                for position in span:
                    block = int(tables[group, position // size])
                    assert self.slots[group, block, position % size] == prefix_hash(after[: position + 1])
        self.tokens[row] = after


@st.composite
def configs(draw):
    """A recurrent group and two others, all sizes of arrays the same; with blocks enough for some rows, not for all."""
    size = draw(st.sampled_from((2, 4, 8)))
    kinds = ["mamba", *draw(st.lists(st.sampled_from(sorted(SPECS)), min_size=2, max_size=2))]
    specs = [SPECS[kind](size) for kind in kinds]
    return hkv.cache_config(hkv.Topology.of_specs(specs), BLOCKS, max_model_len=48)


@st.composite
def inside_configs(draw):
    """The same in blocks of four hash blocks, inside which hits may end, but for a window's."""
    kind = draw(st.sampled_from(sorted(SPECS)))
    specs = [SPECS["mamba"](8), SPECS["full"](8), SPECS[kind](2 if kind == "window" else 8)]
    return hkv.cache_config(hkv.Topology.of_specs(specs), BLOCKS, max_model_len=48, prefix_match_unit=2)


@settings(max_examples=40)
@given(config=configs(), data=st.data())
def test_hostile_chunks_never_resume_from_another_state(config, data):
    drive(config, data)


@settings(max_examples=40)
@given(config=inside_configs(), data=st.data())
def test_hostile_chunks_never_resume_inside_a_block_from_another_state(config, data):
    """Rows wait with hits inside blocks while those whose states they are go on, are refused, and end."""
    drive(config, data)


def drive(config, data) -> None:
    served = Served(config)
    base = [data.draw(st.integers(0, 2)) for _ in range(P)]
    waiting: list[list[int]] = [[] for _ in range(R)]
    for _ in range(data.draw(st.integers(4, 16))):
        for row in range(R):
            if not served.cache.running[row]:
                if data.draw(st.booleans()):
                    prompt = base[: data.draw(st.integers(1, P))]
                    waiting[row] = prompt[served.arrive(row, prompt) :]
            elif data.draw(st.integers(0, 5)) == 0:
                served.cache, _ = hkv.free(served.cache, row)
                waiting[row] = []
        sizes = [data.draw(st.integers(0, T)) for _ in range(R)]
        if data.draw(st.booleans()):
            sizes = np.minimum(sizes, served.cache.allowed).tolist()
        new = [waiting[row][: sizes[row]] for row in range(R)]
        status = served.step(new)
        for row in range(R):
            if status[row] == Status.OK:
                waiting[row] = waiting[row][len(new[row]) :]


def test_a_chunk_that_begins_inside_a_state_block_ends_with_it():
    """Chunks of 12 tokens, a state every 16: what was registered for 16 was the state at 12."""
    config = hkv.cache_config(hkv.Topology.of_specs([SPECS["mamba"](16)] * 3), BLOCKS, max_model_len=64)
    served = Served(config)
    prompt = list(range(32))
    served.arrive(0, prompt)
    assert served.step([prompt[:12], [], []])[0] == Status.OK
    assert served.cache.allowed[0] == 4
    assert served.step([prompt[12:24], [], []])[0] == Status.CROSSES_STATE
    assert served.step([prompt[12:16], [], []])[0] == Status.OK
    assert served.step([prompt[16:28], [], []])[0] == Status.OK
    assert served.arrive(1, prompt) == 16
    assert served.step([[], prompt[16:28], []])[1] == Status.OK
