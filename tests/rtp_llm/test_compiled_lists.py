"""Lists and keys that lock-step traffic on random configurations does not meet: a million tokens, a tail of one block,
and a key that is both a virtual block's and a rank's own.

`tests/slow/rtp_llm/test_jax_lockstep.py` compares every answer and the state with the reference.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hkv.dialects.rtp_llm import log as structs
from hkv.dialects.rtp_llm.config import RtpConfig
from hkv.dialects.rtp_llm.engines.jax import RtpJaxEngine
from hkv.dialects.rtp_llm.log import to_rtp_header
from hkv.dialects.rtp_llm.rules.parameters import RtpParameters, RtpView, has_block, of_config, shape_of, slots
from hkv.keys.rolling import RollingKeys, next_keys
from hkv.model.topology import Topology
from hkv.state.item_table import NAMESPACE
from hkv.state.pooled import ITEM_WORDS, Item
from tests.rtp_llm.build import FULL, LINEAR, SWA, group, shape


def engine(*groups: Any, **fields: Any) -> RtpJaxEngine:
    """The compiled engine, a pool of 20 blocks for each group."""
    config = RtpConfig(topology=Topology(groups, pools="independent"), num_blocks=(20,) * len(groups), **fields)
    return RtpJaxEngine(to_rtp_header(config, "lists"))


def test_a_hole_before_a_tail_of_one_block_is_no_error() -> None:
    for tail, blocks in ((1, "..x"), (2, ".xx")):
        window = engine(group("alone", SWA, 4, active_tail_blocks=tail), linear_step=2)
        window.perform(structs.RequestOp(id="a", tokens=[*range(12)]))
        answer = window.perform(structs.MallocOp(id="a", reuse=False, device_cache=False))
        assert (answer.verdict, shape(answer.lists[0][0])) == ("granted", blocks)


@jax.jit
def _window(parameters: RtpParameters, tokens: Any) -> tuple[Any, Any]:
    """Slots of so many tokens, and whether the last four of them have blocks."""
    view = RtpView(parameters.cache, parameters.groups.reshape(-1), None, parameters.groups.shape[0])
    swa = shape_of(view, jnp.int32(0))
    filled = slots(swa, tokens)
    no, false = jnp.int32(0), jnp.bool_(False)
    return filled, [(filled >= back) & has_block(swa, filled - back, filled, no, false) for back in (1, 2, 3, 4)]


def test_long_sequences_hold_two_blocks() -> None:
    topology = Topology((group("alone", SWA, 256),), pools="independent")
    tokens = np.arange(1, 1_000_001, dtype=np.int32)
    parameters = of_config(RtpConfig(topology=topology, num_blocks=(4,), block_size=256, linear_step=1), 1)
    filled, last = jax.device_get(_window(parameters, tokens))
    np.testing.assert_array_equal(filled, -(-tokens // 256))
    np.testing.assert_array_equal(last, [filled >= 1, filled >= 2, filled < 0, filled < 0])


def test_a_canonical_dependency_is_not_replaced() -> None:
    """A full group, whose keys are those of virtual blocks, is entered before a linear one with the same last key."""
    cache = engine(group("full", FULL, 4), group("linear", LINEAR, 4), linear_step=1, cp_size=2)
    cache.perform(structs.RequestOp(id="a", tokens=[*range(9)]))
    assert cache.perform(structs.MallocOp(id="a")).verdict == "granted"
    cache.perform(structs.InsertOp(id="a"))
    items = np.asarray(cache._state.items)
    logical, canonical = (items[cache._interner.find(key)] for key in next_keys(RollingKeys(), range(9), 4).keys)
    assert [int(item[Item.FLAGS]) // NAMESPACE for item in (logical, canonical)] == [1, 2]
    assert (canonical[Item.ORDINAL], canonical[Item.PARENT]) == (0, 0), "a root, not the second of the sequence's keys"
    assert canonical[ITEM_WORDS : ITEM_WORDS + 2].all(), "the linear group's block is there, too"
