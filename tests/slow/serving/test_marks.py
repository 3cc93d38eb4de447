"""Uses of a served cache that were wrong later in silence are named: when traced, or in debug mode."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from hkv import serving
from hkv.errors import LayoutError, OperationError
from hkv.serving import marks
from hkv.tier.tier import MemoryTier
from tests.serving.test_serving import LONGEST, WIDTH, Host, R, config, turns

TOKENS = 9
CONTENT = np.ones((TOKENS, 1, WIDTH), np.float32)
PAGES = {"key": CONTENT, "value": CONTENT}
STATES = {"state0": np.ones((1, WIDTH), np.float32)}


def begun(*, debug: bool = True, row: int = 0, served: serving.Serving | None = None, tokens: int = 8):
    """A cache whose row has come and computed its first tokens, and the turn: nothing is written yet."""
    served = serving.from_config(config(), rows=R, debug=debug) if served is None else served
    prompt = np.zeros((1, LONGEST), np.int32)
    served, found = serving.arrive(served, np.array([row]), prompt, np.array([TOKENS]))
    hit = int(found.hits[0])
    padded = np.zeros(TOKENS, np.int32)
    return serving.step(served, padded, np.array([0, tokens - hit]), np.array([row]))


def one_more(served: serving.Serving):
    """The next token of row 0."""
    return serving.step(served, np.zeros(TOKENS, np.int32), np.array([0, 1]), np.array([0]))


def written(served: serving.Serving, turn: serving.Turn, but: str = "") -> serving.Serving:
    """The turn's tokens and states in all layers but one."""
    for layer in served.layers:
        if layer.name != but:
            write, content = (serving.write_state, STATES) if layer.states else (serving.write, PAGES)
            served = write(served, layer.name, turn, content)
    return served


def unmarked(text: str):
    """Checks of `checkify` outside `jit`."""
    return pytest.raises(checkify.JaxRuntimeError, match=re.escape(text))


@pytest.mark.parametrize("debug", [False, True])
def test_parts_that_are_not_given_are_named(debug):
    """Keys alone left values of 0, or of whoever had the block before."""
    served, turn = begun(debug=debug)
    with pytest.raises(
        LayoutError, match=r"values of 'near' = \['key'\]: expected every part of its pages: key, value"
    ):
        serving.write(served, "near", turn, {"key": CONTENT})
    with pytest.raises(LayoutError, match=r"values of 'state' = \[\]: expected every part of its pages: state0"):
        serving.write_state(served, "state", turn, {})


def test_layers_of_the_other_sort_are_refused():
    served, turn = begun(debug=False)
    for call in (
        lambda: serving.read_state(served, "full", turn),
        lambda: serving.write_state(served, "full", turn, STATES),
        lambda: serving.checkpoint_tokens(served, "full", turn),
        lambda: serving.carry_states(served, "full", turn),
    ):
        with pytest.raises(OperationError, match="layer = 'full': expected a layer of states"):
            call()
    for call in (
        lambda: serving.write(served, "state", turn, PAGES),
        lambda: serving.attend(served, "state", turn, CONTENT),
    ):
        with pytest.raises(OperationError, match="layer = 'state': expected a layer of tokens"):
            call()


def test_rows_that_do_not_exist_are_not_gathered():
    served, _ = begun()
    for row in (9, -1, np.int64(R)):
        with pytest.raises(OperationError, match=f"row = {int(row)}: expected a row from 0 to {R - 1}"):
            serving.gather(served, "full", row)
    with unmarked("gather: row = 9: expected a row from 0 to 2"):
        serving.gather(served, "full", jnp.int32(9))
    with pytest.raises(OperationError, match=r"row = .float32\[\]."):
        serving.gather(served, "full", jnp.float32(0))


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        ((2, 5), "begins at 2: expected 0"),
        ((0, 10), "ends at 10: expected at most 9"),
        ((0, 5, 3), "falls from 5 to 3"),
    ],
)
def test_batches_that_do_not_begin_at_0_or_leave_the_array_are_named(ends, said):
    served, turn = begun()
    served = written(served, turn)
    with unmarked(f"step: cu_q_lens {said}"):
        serving.step(served, np.zeros(TOKENS, np.int32), np.array(ends))


def test_attention_before_the_write_is_named():
    """It read what the slots held before: zeros, or another request's tokens."""
    served, turn = begun()
    with unmarked("attend: layer 'near': token 0 of query 0 was never written"):
        serving.attend(served, "near", turn, CONTENT)
    served = written(served, turn)
    serving.attend(served, "near", turn, CONTENT)
    served, turn = one_more(served)
    with unmarked("attend: layer 'near': token 8 of query 0 was never written"):  # of a block that was written before
        serving.attend(served, "near", turn, CONTENT)


def test_what_lies_before_a_window_is_not_asked_for():
    """Layers of the same group are marked apart: one that was not written is named when it is read."""
    served, turn = begun()
    served = written(served, turn, but="near")
    served, turn = one_more(served)
    served = written(served, turn)
    serving.attend(served, "nearer", turn, CONTENT)
    with unmarked("attend: layer 'near': token 3 of query 0 was never written"):  # 3 to 8 of a window of 6
        serving.attend(served, "near", turn, CONTENT)


def test_the_turn_of_an_earlier_step_is_named():
    served, first = begun()
    served = written(served, first)
    served, _ = one_more(served)
    for call in (
        lambda: serving.attend(served, "full", first, CONTENT),
        lambda: serving.write(served, "full", first, PAGES),
        lambda: serving.read_state(served, "state", first),
        lambda: serving.write_state(served, "state", first, STATES),
    ):
        with unmarked("turn is of step 1: expected the last one's, 2"):
            call()
    _, plain = begun(debug=False)
    with pytest.raises(OperationError, match="turn = 'a turn without debug marks'"):
        serving.attend(served, "full", plain, CONTENT)


def uses(served: serving.Serving, turn: serving.Turn):
    """Everything that takes a turn."""
    return (
        lambda: serving.write(served, "full", turn, PAGES),
        lambda: serving.mark_written(served, "near", turn),
        lambda: serving.attend(served, "full", turn, CONTENT),
        lambda: serving.read_state(served, "state", turn),
        lambda: serving.write_state(served, "state", turn, STATES),
        lambda: serving.ragged(served, turn, "full"),
    )


def test_the_turn_of_a_request_that_has_ended_is_named():
    """Its blocks are whoever's next, and found by its keys: the next hit read what such a write left."""
    served, turn = begun(row=1)
    served = written(served, turn)
    served, _ = serving.finish(served, np.array([2, -1]))  # no request: nothing ends
    served = serving.write(served, "full", turn, PAGES)
    ended, _ = serving.finish(served, np.array([1, -1]))
    for call in uses(ended, turn):
        with unmarked("the request of query 0 has ended, in row 1, since the turn's step"):
            call()
    # Another request in the same row, with the same blocks.
    prompt = np.zeros((1, LONGEST), np.int32)
    again, found = serving.arrive(ended, np.array([1]), prompt, np.array([TOKENS]))
    assert found.hits.tolist() == [8]
    for call in uses(again, turn):
        with unmarked("the request of query 0 has ended"):
            call()


def test_a_turn_outlives_requests_of_other_rows():
    """Those of other rows may end before its layers are written."""
    served, turn = begun(row=1)
    served, _ = serving.arrive(served, np.array([0]), np.ones((1, LONGEST), np.int32), np.array([TOKENS]))
    served, _ = serving.finish(served, np.array([0]))
    serving.attend(written(served, turn), "full", turn, CONTENT)


def test_the_turn_of_another_cache_is_named():
    """Also where both have taken as many steps, and where both came from one."""
    mine, _ = begun()
    _, other = begun()
    for call in uses(mine, other):
        with unmarked("turn is of a step 1 that this cache has not taken"):
            call()

    @jax.jit
    @checkify.checkify
    def branched(served):
        first, turn = serving.step(served, np.zeros(TOKENS, np.int32), np.array([0, 1]))
        second, _ = serving.step(served, np.ones(TOKENS, np.int32), np.array([0, 1]))
        return serving.write(first, "full", turn, PAGES).pool, serving.write(second, "full", turn, PAGES).pool

    error, _ = branched(mine)
    assert "turn is of a step 2 that this cache has not taken" in error.get()


def test_a_state_that_was_not_written_is_neither_read_nor_found():
    """Its chunk was registered when the step handed out its block: 8 tokens were found on a state never written."""
    served, turn = begun()
    served = written(served, turn, but="state")
    after, turn = one_more(served)
    with unmarked("read_state: layer 'state': the state after 8 tokens of query 0 was not written"):
        serving.read_state(after, "state", turn)
    with unmarked("arrive: layer 'state': the state after 8 tokens of request 0 was not written"):
        begun(row=1, served=after)


def test_a_state_is_read_before_it_is_written():
    """A state that goes on in its block is another one behind `write_state`."""
    served, turn = begun(tokens=5)
    served = written(served, turn)
    served, turn = one_more(served)
    assert turn.result.reads[0, 2] == turn.result.writes[0, 2]
    serving.read_state(served, "state", turn)
    served = written(served, turn)
    with unmarked("state after 5 tokens of query 0 was not written: its block holds the one after 6"):
        serving.read_state(served, "state", turn)


def test_pages_that_were_not_written_are_neither_found_nor_stored():
    served, turn = begun()
    served = written(served, turn, but="full")
    places = serving.Offload(MemoryTier(1 << 20), "a model")
    with pytest.raises(OperationError, match=re.escape("row = \"chunk 0 of layer 'full'\"")):
        serving.store(served, places, 0, [0] * TOKENS)
    with unmarked("arrive: layer 'full': token 0 of request 0 was never written"):
        begun(row=1, served=served)


def test_what_a_kernel_of_the_callers_wrote_is_told():
    served, turn = begun()
    for layer in served.layers:
        served = serving.mark_written(served, layer.name, turn)
    serving.attend(served, "full", turn, CONTENT)
    begun(row=1, served=served)


def test_what_a_tier_gave_back_is_written():
    served, turn = begun()
    served, places = written(served, turn), serving.Offload(MemoryTier(1 << 20), "a model")
    assert serving.store(served, places, 0, [0] * TOKENS) > 0
    fresh, length = serving.load(serving.from_config(config(), rows=R, debug=True), places, [0] * TOKENS)
    assert length == 8
    fresh, turn = begun(served=fresh, tokens=TOKENS)
    assert turn.kv_lens.tolist() == [TOKENS]
    serving.read_state(fresh, "state", turn)


def test_inside_jit_checks_are_returned():
    served, turn = begun()
    attend = jax.jit(checkify.checkify(lambda served, turn: serving.attend(served, "full", turn, CONTENT)))
    error, _ = attend(served, turn)
    assert "token 0 of query 0 was never written" in error.get()
    error, _ = attend(written(served, turn), turn)
    error.throw()


def test_a_cache_outside_debug_mode_traces_nothing_of_it(monkeypatch):
    """A whole loop of turns is the program that it is without the marks' functions, and has no check."""
    host = Host(debug=False)
    given = host.served, host.history, host.known, host.arrived, host.targets
    traced = str(jax.make_jaxpr(turns)(*given))
    called = []
    for name in ("handed_out", "with_slots", "with_states", *(n for n in vars(marks) if n.startswith("require_"))):
        monkeypatch.setattr(marks, name, lambda *_, name=name: called.append(name))
    assert str(jax.make_jaxpr(turns)(*given)) == traced
    assert called == []
    assert "check" not in re.sub(r"name=\w+", "", traced)
    assert len(jax.tree.leaves(host.served)) == len(jax.tree.leaves((host.served.cache, host.served.pool)))
