"""Hostile chunks, served: every state and token in a pool's bytes is the one that its key or its row says."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import hkv
from hkv import serving
from hkv.cache.cache import Cache
from hkv.model.topology import Group
from hkv.paged import operations as paged
from tests.step.hostile_chunks import drive
from tests.step.paged_model import BLOCKS, FACTOR, R, Served

PARTS = {"full": "key", "near": "key", "state": "state0"}


def config(unit: int | None, **options) -> hkv.VllmConfig:
    """Full attention, a window, and a state that chunks leave behind inside them; `unit`: hits end inside blocks."""
    full = hkv.FullAttention(block_size=8 if unit else 4, num_kv_heads=1, head_size=1, dtype="uint32")
    near = hkv.SlidingWindow(block_size=unit or 4, num_kv_heads=1, head_size=1, dtype="uint32", window=5)
    state = hkv.Mamba(
        block_size=8 if unit else 4,
        shapes=((1,),),
        dtypes=("uint32",),
        num_prefill_checkpoint_blocks=1,
        prefill_checkpoint_alignment=1,
        num_speculative_blocks=0 if unit else 2,
    )
    named = {"full": full, "near": near, "state": state}
    groups = tuple(Group(tag=name, spec=spec, layers=(name,)) for name, spec in named.items())
    topology = hkv.Topology(groups=groups)
    return hkv.cache_config(topology, BLOCKS, max_model_len=48, prefix_match_unit=unit, **options)


@functools.partial(jax.jit, donate_argnums=0)
def compute(
    served: serving.Serving,
    tokens: jax.Array,
    cu_q_lens: jax.Array,
    rows: jax.Array,
    drafts: jax.Array,
    in_flight: jax.Array,
) -> tuple[serving.Serving, serving.Turn]:
    """A step of the model: the number that stands for each prefix, made of the one that is read for the prefix before.

    Drafts write 0, as nothing that stands for a prefix.
    """
    served, turn = serving.step(served, tokens, cu_q_lens, rows, drafts, in_flight)
    before = serving.read_state(served, "state", turn)["state0"][:, 0]
    begins = turn.kv_lens == turn.cu_q_lens[1:] - turn.cu_q_lens[:-1]
    inside = serving.checkpoint_tokens(served, "state", turn)

    def token(carry: tuple[jax.Array, jax.Array], place: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        states, left = carry
        query = jnp.minimum(jnp.searchsorted(turn.cu_q_lens, place, side="right") - 1, R - 1)
        settled = (turn.positions[place] >= 0) & (place < turn.cu_q_lens[query + 1] - drafts[query])
        state = states[query] * jnp.uint32(FACTOR) + tokens[place].astype(jnp.uint32) + jnp.uint32(7)
        at = jnp.where(settled, query, R)
        there = jnp.where(place + 1 - turn.cu_q_lens[query] == inside[query], at, R)
        carry = states.at[at].set(state, mode="drop"), left.at[there].set(state, mode="drop")
        return carry, jnp.where(settled, state, 0)

    states = jnp.where(begins, jnp.uint32(1), before)
    (states, left), hashes = lax.scan(token, (states, states), jnp.arange(tokens.shape[0]))
    for layer in ("full", "near"):
        values = dict.fromkeys(("key", "value"), hashes[:, None, None])
        served = serving.write(served, layer, turn, values)
    served = serving.write_state(served, "state", turn, {"state0": states[:, None]}, {"state0": left[:, None]})
    return served, turn


@jax.jit
def pages(served: serving.Serving) -> dict[str, jax.Array]:
    """Content of every block of each layer, [BLOCKS, tokens of a page]."""
    found = {}
    for layer, part in PARTS.items():
        at = served.layer(layer)
        read, _ = paged.gather(served.pool, at.layout, at.index, jnp.arange(BLOCKS))
        found[layer] = read[part].reshape(BLOCKS, -1)
    return found


@functools.partial(jax.jit, donate_argnums=0)
def spoiled(served: serving.Serving, blocks: jax.Array) -> serving.Serving:
    """The pool with 0 in all pages of some blocks, int32[BLOCKS]; -1 for none."""
    pool = served.pool
    for layer in PARTS:
        pool, _ = paged.zero_blocks(pool, served.layer(layer).layout, blocks)
    return serving.Serving(served.cache, pool, served.layers, served.state_unit, served.tail_unit)


class Pooled(Served):
    """The same in the pool of `hkv.serving`, whose copies and writes are judged with its plans."""

    def _make(self) -> None:
        self.served = serving.from_config(self.config, rows=R)

    @property
    def cache(self) -> Cache:
        return self.served.cache

    def _arrive(self, row: np.ndarray, padded: np.ndarray, counts: np.ndarray, prompts: np.ndarray):
        self.served, found = serving.arrive(self.served, row, padded, counts, prompts=prompts)
        return found

    def _free(self, row: int) -> int:
        self.served, status = serving.finish(self.served, np.array([row]))
        return int(status[0])

    def _step(self, batch):
        self.served, turn = compute(self.served, *batch)
        return jax.device_get((turn.result, self.cache.tables))

    def _take(self, row: int, chunk: list[int], result, query: int, ends, table) -> None:
        """Notes a query whose values `compute` has checked and written into the pool."""
        before, self.tokens[row] = len(self.tokens[row]), [*self.tokens[row], *chunk]
        self._name(self.tokens[row])
        for tokens, block in result.checkpoints[query].tolist():
            if block >= 0:
                self._note_left(self.tokens[row], before + tokens)

    def require(self) -> None:
        refs = np.asarray(self.cache.state.refs)
        self.served = spoiled(self.served, np.where(refs == 0, np.arange(BLOCKS), -1))
        for group, page in enumerate(jax.device_get(pages(self.served)).values()):
            for block, words in enumerate(page.tolist()):
                if self.specs[group].snapshot:
                    self.states[group, block] = words[0]
                else:
                    self.slots.update({(group, block, offset): word for offset, word in enumerate(words)})
        super().require()


@settings(max_examples=25)
@given(unit=st.sampled_from((None, 2)), interval=st.sampled_from((None, 0, 16)), data=st.data())
def test_hostile_chunks_never_resume_from_another_state(unit, interval, data):
    drive(config(unit, retention_interval=interval), data, Pooled)


def test_rows_have_room_for_states_of_drafts():
    """40 tokens in blocks of 4, and two states behind the tenth."""
    specs = [hkv.Mamba(block_size=4, shapes=((1,),), dtypes=("uint32",), num_speculative_blocks=2)]
    groups = tuple(Group(tag="state", spec=spec, layers=("state",)) for spec in specs)
    made = hkv.cache_config(hkv.Topology(groups=groups), BLOCKS, max_model_len=40)
    assert serving.from_config(made, rows=R).cache.tables.shape == (R, 1, 12)
