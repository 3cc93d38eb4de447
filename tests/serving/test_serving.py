"""A small model served through `hkv.serving` in one compiled loop says what it says without a cache."""

from __future__ import annotations

import dataclasses
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import checkify

import hkv
from hkv import serving
from hkv.errors import ConfigError, FileError, MissingExtraError, OperationError
from hkv.model.topology import Group
from hkv.serving.objects import chunk_objects
from hkv.state.status import Status
from tests.cache.build import large_copies

R, LONGEST, BUDGET, WIDTH, VOCABULARY, BLOCKS = 3, 40, 12, 8, 16, 22
WINDOW = 6
DATA = pathlib.Path(__file__).parents[1] / "data"


def config(num_blocks: int = BLOCKS):
    """Full attention, a window and a recurrent state, one layer each, and a second window."""
    full = hkv.FullAttention(block_size=4, num_kv_heads=1, head_size=WIDTH, dtype="float32")
    window = hkv.SlidingWindow(block_size=4, num_kv_heads=1, head_size=WIDTH, dtype="float32", window=WINDOW)
    state = hkv.Mamba(block_size=4, shapes=((WIDTH,),), dtypes=("float32",))
    named = ((full, ("full",)), (window, ("near", "nearer")), (state, ("state",)))
    groups = tuple(Group(tag=layers[0], spec=spec, layers=layers) for spec, layers in named)
    return hkv.cache_config(hkv.Topology(groups=groups), num_blocks, max_model_len=LONGEST)


def weights() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    names = [f"{layer}.{part}" for layer in ("full", "near", "nearer") for part in "qkv"] + ["state"]
    made = {name: draw.normal(size=(WIDTH, WIDTH)) / WIDTH**0.5 for name in names}
    made["embed"] = draw.normal(size=(VOCABULARY, WIDTH))
    return {name: array.astype(np.float32) for name, array in made.items()}


WEIGHTS = weights()


def alone(tokens: list[int]) -> np.ndarray:
    """The logits of the last token by NumPy, every token computed from the first on."""
    last, state = hidden(tokens)
    return (last + state) @ WEIGHTS["embed"].astype(np.float64).T


def hidden(tokens: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """The last token's vector before the recurrent layer, and that layer's state after it."""
    named = {name: np.asarray(array, np.float64) for name, array in WEIGHTS.items()}
    x = named["embed"][tokens]
    for layer, reach in (("full", len(tokens)), ("near", WINDOW), ("nearer", WINDOW)):
        q, k, v = (x @ named[f"{layer}.{part}"] for part in "qkv")
        found = []
        for n in range(len(x)):
            first = max(0, n - reach + 1)
            scores = k[first : n + 1] @ q[n] / WIDTH**0.5
            weight = np.exp(scores - scores.max())
            found.append(weight @ v[first : n + 1] / weight.sum())
        x = x + np.array(found)
    state = np.zeros(WIDTH)
    for n in range(len(x)):
        state = 0.5 * state + np.tanh(x[n] @ named["state"])
    return x[-1], state


def forward(served: serving.Serving, turn: serving.Turn, plan: serving.StepPlan) -> tuple[serving.Serving, jax.Array]:
    """Logits of each query's last token, [R, VOCABULARY]."""
    x = jnp.asarray(WEIGHTS["embed"])[plan.tokens]
    for layer in ("full", "near", "nearer"):
        q, k, v = (x @ WEIGHTS[f"{layer}.{part}"] for part in "qkv")
        served = serving.write(served, layer, turn, {"key": k[:, None], "value": v[:, None]})
        x = x + serving.attend(served, layer, turn, q[:, None])[:, 0]
    before = serving.read_state(served, "state", turn)["state0"]
    new = jnp.tanh(x @ WEIGHTS["state"])
    query = jnp.searchsorted(turn.cu_q_lens, jnp.arange(BUDGET), side="right") - 1

    inside = serving.checkpoint_tokens(served, "state", turn)

    def token(carry: tuple[jax.Array, jax.Array], n: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
        states, left = carry
        at = jnp.where(turn.positions[n] >= 0, query[n], R)
        row = jnp.minimum(at, R - 1)
        state = 0.5 * states[row] + new[n]
        there = jnp.where(n + 1 - turn.cu_q_lens[row] == inside[row], at, R)
        return (states.at[at].set(state, mode="drop"), left.at[there].set(state, mode="drop")), None

    (states, left), _ = lax.scan(token, (before, before), jnp.arange(BUDGET))
    served = serving.write_state(served, "state", turn, {"state0": states}, {"state0": left})
    last = jnp.maximum(turn.cu_q_lens[1:] - 1, 0)
    return served, (x[last] + states) @ WEIGHTS["embed"].T


def turn_of(served, history, known, arrived, targets):
    """One turn of the rows that are not done: what is computed, and the token that each says when all is."""
    plan = serving.schedule(served, history, jnp.where(known < targets, known, 0), arrived, budget=BUDGET)
    served, turn = serving.step(served, plan.tokens, plan.cu_q_lens, plan.rows)
    served, logits = forward(served, turn, plan)
    row = jnp.where(turn.served, plan.rows, 0)
    place = jnp.where(turn.served & (served.cache.computed[row] == known[row]), row, R)
    said = jnp.argmax(logits, axis=1).astype(jnp.int32)
    history = history.at[place, known[row]].set(said, mode="drop")
    return served, history, known.at[place].add(1, mode="drop"), serving.victim(served, plan, turn, arrived)


def turns(served, history, known, arrived, targets):
    """Turns until every row has its tokens, or one has to be preempted."""

    def more(carry):
        return jnp.any(carry[2] < targets) & (carry[3] < 0)

    def body(carry):
        return turn_of(*carry[:3], arrived, targets)

    return lax.while_loop(more, body, (served, history, known, jnp.int32(-1)))


serve = jax.jit(turns, donate_argnums=0)
checked = jax.jit(checkify.checkify(turns), donate_argnums=0)
"""`serve` of a cache in debug mode: an error beside what it gives."""


class Host:
    """Requests in rows of a cache in debug mode; those that are preempted return."""

    def __init__(self, made: hkv.VllmConfig | None = None, *, debug: bool = True) -> None:
        self.served = serving.from_config(config() if made is None else made, rows=R, debug=debug)
        self.history = np.zeros((R, LONGEST), np.int32)
        self.known, self.arrived, self.targets = (np.zeros(R, np.int32) for _ in range(3))
        self.preempted = 0

    def arrive(self, row: int, tokens: list[int], target: int) -> int:
        padded = np.zeros(LONGEST, np.int32)
        padded[: len(tokens)] = tokens
        asked = np.array([row]), padded[None], np.array([len(tokens)])
        self.served, found = serving.arrive(self.served, *asked)
        assert found.status[0] == 0
        self.history[row], self.known[row], self.targets[row] = padded, len(tokens), target
        self.arrived[row] = self.arrived.max() + 1
        return int(found.hits[0])

    def run(self) -> None:
        while True:
            given = self.served, self.history, self.known, self.arrived, self.targets
            if self.served.marks is None:
                found = serve(*given)
            else:
                error, found = checked(*given)
                error.throw()
            self.served = found[0]
            self.history, self.known, victim = (np.array(array) for array in found[1:])
            if victim < 0:
                return
            self.preempted += 1
            row, target = int(victim), int(self.targets[victim])
            tokens = self.tokens(row)
            self.leave(row)
            self.run()
            self.arrive(row, tokens, target)

    def tokens(self, row: int) -> list[int]:
        return self.history[row, : self.known[row]].tolist()

    def leave(self, row: int) -> None:
        self.served, _ = serving.finish(self.served, np.array([row]))
        self.known[row] = self.targets[row] = 0


def check(tokens: list[int], prompt: int) -> None:
    """Every generated token is the most likely one, up to what float32 can tell apart."""
    for end in range(prompt, len(tokens)):
        logits = alone(tokens[:end])
        assert logits.max() - logits[tokens[end]] < 1e-4


PROMPTS = [np.random.default_rng(n).integers(0, VOCABULARY, size).tolist() for n, size in ((1, 13), (2, 21), (3, 9))]


def test_tokens_are_those_without_a_cache_through_hits_and_preemption():
    host = Host()
    alone = []
    for row, prompt in enumerate(PROMPTS):
        host.arrive(row, prompt, len(prompt) + 8)
        host.run()
        alone.append(host.tokens(row))
        check(alone[row], len(prompt))
        host.leave(row)
    assert host.arrive(0, alone[2], len(alone[2]) + 3) == 16
    host.run()
    check(host.tokens(0), len(alone[2]))
    host.leave(0)
    assert host.preempted == 0
    for row, prompt in enumerate(PROMPTS):
        host.arrive(row, prompt, len(prompt) + 8)
    host.run()
    assert host.preempted
    waiting = [row for row in range(R) if host.tokens(row) != alone[row]]
    assert not waiting


def test_the_pool_is_changed_in_place():
    """No array of the pool's size is copied in the loop, and none but constants is made beside it."""
    host = Host(debug=False)
    lowered = serve.lower(host.served, host.history, host.known, host.arrived, host.targets)
    copied = large_copies(lowered.compile().as_text(), host.served.pool.size)
    assert [line for line in copied if " scatter(" not in line] == []


@pytest.mark.parametrize(
    ("save", "restore", "debug"),
    [(serving.save, serving.restore, False), (serving.save_orbax, serving.restore_orbax, True)],
)
def test_a_file_gives_back_the_cache_and_its_pages(save, restore, debug, tmp_path):
    """Bit for bit, and what is restored goes on with the same tokens from the same blocks."""
    host = Host(debug=debug)
    host.arrive(0, PROMPTS[0], 16)
    host.run()
    save(tmp_path / "served", config(), host.served)
    back = restore(tmp_path / "served", config(), serving.from_config(config(), rows=R, debug=debug))
    jax.tree.map(np.testing.assert_array_equal, back, host.served)
    with pytest.raises(ConfigError, match="num_blocks"):
        restore(tmp_path / "served", config(23), back)
    other = Host()
    other.served = jax.tree.map(np.asarray, back)  # not committed to a device, as those of the other: no new program
    for each in (host, other):
        each.history[0], each.known[0], each.targets[0] = host.history[0], 16, 24
        each.arrive(1, PROMPTS[1], 26)
        each.run()
    assert other.tokens(0) == host.tokens(0)
    assert other.tokens(1) == host.tokens(1)
    jax.tree.map(np.testing.assert_array_equal, other.served, host.served)


def test_folders_that_are_no_checkpoints_and_other_layers_are_refused(tmp_path):
    served = serving.from_config(config(), rows=R)
    serving.save_orbax(tmp_path / "served", config(), served)
    with pytest.raises(FileError, match="a new folder"):
        serving.save_orbax(tmp_path / "served", config(), served)
    with pytest.raises(FileError, match="a folder that save_orbax wrote"):
        serving.restore_orbax(tmp_path, config(), served)
    moved = tuple(dataclasses.replace(layer, group=0) for layer in served.layers)
    with pytest.raises(OperationError, match="the same layers in the same places"):
        serving.restore_orbax(tmp_path / "served", config(), dataclasses.replace(served, layers=moved))


def test_without_orbax_its_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(MissingExtraError, match=re.escape("pip install 'hkv[orbax]'")):
        serving.save_orbax(tmp_path / "served", config(), serving.from_config(config(), rows=R))


def test_what_is_not_there_is_named():
    served = serving.from_config(config(), rows=R)
    with pytest.raises(OperationError, match="layer = 'head': expected one of full, near, nearer, state"):
        served.layer("head")
    unnamed = hkv.cache_config(hkv.Topology.of_specs([hkv.FullAttention(block_size=4)]), 20, max_model_len=32)
    with pytest.raises(ConfigError, match=r"groups\[0\]\.layers"):
        serving.from_config(unnamed, rows=R)


def test_a_plan_is_served_and_no_layer_lies_on_another():
    """Gemma 3's layers of all groups, in the pool that the plan describes, each with keys of its own."""
    model = hkv.read_model(DATA / "models" / "gemma3_text.json")
    served = serving.from_plan(hkv.plan(model, "32MiB", max_model_len=128), rows=2)
    assert len(served.layers) == 26
    assert len({layer.group for layer in served.layers}) == 7

    @jax.jit
    def begun(served):
        served, _ = serving.arrive(served, jnp.array([0]), jnp.arange(20)[None], jnp.array([20]))
        return serving.step(served, jnp.arange(20), jnp.array([0, 20]))

    served, turn = begun(served)
    assert turn.kv_lens.tolist() == [20]
    assert turn.positions.tolist() == list(range(20))
    shape = (20, served.layers[0].layout.shape[2], *served.layers[0].layout.part("key").shape)
    for number, layer in enumerate(served.layers):
        key = np.full(shape, number + 1, jnp.bfloat16)
        served = serving.write(served, layer.name, turn, {"key": key, "value": -key})
    for number, layer in enumerate(served.layers):
        found = jax.device_get(serving.gather(served, layer.name, 0))
        assert (found["key"][:20] == number + 1).all()
        assert (found["value"][:20] == -number - 1).all()
        assert not found["key"][20:].any()


@pytest.mark.parametrize(
    ("left", "rows", "counts"),
    [
        ((8, 1, 0), [1, 0, -1], [1, 4, 0]),  # the state before the final token is kept, not the one behind it
        ((7, 8, 2), [0, 1, 2], [4, 4, 2]),  # two tokens are no decode: first come, first served
        ((9, 2, 1), [2, 0, 1], [1, 8, 2]),
    ],
)
def test_chunks_end_where_states_are_kept_and_decodes_come_first(left, rows, counts):
    served = serving.from_config(config(), rows=R)
    tokens = np.arange(R * LONGEST).reshape(R, LONGEST) % VOCABULARY
    asked = [row for row in range(R) if left[row]]
    served, _ = serving.arrive(served, np.array(asked), tokens[asked], np.array([left[row] for row in asked]))
    plan = serving.schedule(served, tokens, np.array(left), np.arange(R), budget=BUDGET)
    assert (plan.rows.tolist(), plan.counts.tolist()) == (rows, counts)
    assert plan.cu_q_lens.tolist() == np.cumsum([0, *counts]).tolist()
    chunks = [tokens[row, :count] for row, count in zip(rows, counts, strict=True)]
    assert plan.tokens.tolist() == [*np.concatenate(chunks).tolist(), *[0] * (BUDGET - sum(counts))]


@pytest.mark.parametrize(
    ("known", "width", "status"),
    [
        (9, LONGEST, Status.OK),
        (0, LONGEST, Status.OK),  # left out
        (7, LONGEST, Status.BAD_COUNT),
        (-1, LONGEST, Status.BAD_COUNT),
        (LONGEST, LONGEST, Status.OK),
        (LONGEST + 1, 2 * LONGEST, Status.ROW_FULL),
        (LONGEST + 1, LONGEST, Status.BAD_COUNT),
    ],
)
def test_rows_that_are_never_planned_have_a_status(known, width, status):
    """They waited for ever: a server that looked at the plan alone had nothing to tell them from rows that are done."""
    served = serving.from_config(config(), rows=R)
    history = np.zeros((R, width), np.int32)
    served, _ = serving.arrive(served, np.array([0]), history[:1, :LONGEST], np.array([8]))
    served, _ = serving.step(served, np.zeros(8, np.int32), np.array([0, 8]))
    plan = serving.schedule(served, history, np.array([known, 0, 5]), np.arange(R), budget=LONGEST)
    assert plan.status.tolist() == [status, Status.OK, Status.NOT_RUNNING]
    assert (plan.counts.sum() > 0) == (status == Status.OK and known > 0)


def test_only_a_row_that_runs_is_preempted_and_only_if_one_was_refused():
    served, history = serving.from_config(config(), rows=R), np.zeros((R, LONGEST), np.int32)
    served, _ = serving.arrive(served, np.array([1]), history[:1], np.array([9]))
    arrived = np.array([9, 0, 3])
    plan = serving.schedule(served, history, np.array([0, 9, 0]), arrived, budget=BUDGET)
    served, turn = serving.step(served, plan.tokens, plan.cu_q_lens, plan.rows)
    assert serving.victim(served, plan, turn, arrived) == -1
    status = np.full_like(turn.result.status, int(Status.NO_ROOM))
    refused = dataclasses.replace(turn, result=dataclasses.replace(turn.result, status=status))
    assert serving.victim(served, plan, refused, arrived) == 1


@pytest.mark.parametrize("eagle", [False, True])
def test_a_hit_that_a_draft_takes_back_finds_the_state_before_it(eagle):
    """Chunks of a block: attention takes a hit back by one, so that the states after the last two are read."""
    made = dataclasses.replace(config(), eagle=eagle)
    objects = chunk_objects(serving.from_config(made, rows=R), 4)
    windows = {entry.members[0].layers[0].name: entry.window for entry in objects.entries}
    assert windows == ({"full": -1, "near": -1, "state": 2} if eagle else {"full": -1, "near": 2, "state": 1})


def test_a_layer_sees_what_its_kind_does():
    """The mean of values under equal scores: of all tokens, or of those in the window."""
    served = serving.from_config(config(), rows=R)
    served, _ = serving.arrive(served, np.array([0]), np.zeros((1, LONGEST), np.int32), np.array([9]))
    served, turn = serving.step(served, np.zeros(9, np.int32), np.array([0, 9]))
    value = np.repeat(np.arange(9, dtype=np.float32)[:, None, None], WIDTH, axis=2)
    for layer, first in (("full", 0), ("near", 9 - WINDOW)):
        served = serving.write(served, layer, turn, {"key": np.zeros_like(value), "value": value})
        found = serving.attend(served, layer, turn, value)
        np.testing.assert_allclose(np.asarray(found)[8, 0], np.mean(np.arange(first, 9)), rtol=1e-6)


@pytest.mark.parametrize("layer", ["full", "near"])
@pytest.mark.parametrize("setting", [{"window": 3}, {"chunk": 4}, {"sink_tokens": 1}, {"scales": 1.0}])
def test_what_a_layer_sees_is_no_setting(layer, setting):
    """A window narrowed full attention in silence; beside a layer's own it was a TypeError."""
    served = serving.from_config(config(), rows=R)
    served, turn = serving.step(served, np.zeros(9, np.int32), np.array([0, 9]))
    six = "scale, soft_cap, sinks, key_scale, value_scale, value_size"
    with pytest.raises(OperationError, match=f"settings = '{next(iter(setting))}': expected one of {six}: "):
        serving.attend(served, layer, turn, np.ones((9, 1, WIDTH), np.float32), **setting)
