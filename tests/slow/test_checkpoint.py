"""A saved cache goes on as if it had never stopped, and is restored into nothing else."""

from __future__ import annotations

import dataclasses
import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hkv.cache import checkpoint
from hkv.cache import step as serving
from hkv.cache.state import StepBatch
from hkv.dialects.vllm import machine as cache
from hkv.dialects.vllm.rules.operations import Batch, Code
from hkv.errors import ConfigError, FileError, LayoutError, OperationError
from hkv.keys.fingerprint import ROOT
from hkv.layout.block_layout import Layout
from hkv.paged.operations import gather, write
from hkv.spec import FullAttention
from tests.reference.build import config as build

pytest.importorskip("safetensors", reason="needs the extra 'disk'")

ROWS, BLOCKS = 4, 64
CONFIG = build("full:2,swa:2:4", num_blocks=BLOCKS, max_model_len=64)
SPEC = FullAttention(block_size=2, num_kv_heads=2, head_size=4, dtype="float32")
LAYOUT = Layout.of_spec(SPEC, "LBHNC", num_blocks=BLOCKS)


class Serving:
    """Rows that decode: state and pages."""

    def __init__(self) -> None:
        self.parameters, state = serving.init(CONFIG, rows=ROWS, row=32)
        rows = np.arange(ROWS, dtype=np.int32)
        self.state, _ = serving.start(state, rows, np.tile(np.uint32(ROOT), (ROWS, 1)))
        self.pool = jnp.zeros(BLOCKS * LAYOUT.page_size // 4, jnp.uint32)

    def step(self, number: int) -> None:
        tokens = np.random.default_rng(number).integers(0, 9, ROWS).astype(np.int32)
        rows = np.arange(ROWS, dtype=np.int32)
        rows[number % ROWS] = -1
        none = np.zeros(ROWS, np.int32)
        batch = StepBatch(tokens, np.arange(ROWS + 1, dtype=np.int32), rows, none, none)
        self.state, result = serving.jitted(16)(self.parameters, self.state, batch)
        assert not result.status.any()
        value = jnp.asarray(np.random.default_rng(number).normal(size=(ROWS, 2, 4)), jnp.float32)
        blocks, offsets = result.blocks[0], result.offsets[0]
        parts = {"key": value, "value": -value}
        self.pool, dropped = write(self.pool, LAYOUT, jnp.int32(0), blocks, offsets, parts)
        assert int(dropped) == 0

    def content(self) -> list[np.ndarray]:
        rows = np.asarray(self.state.rows)[:, 0]
        pages = [gather(self.pool, LAYOUT, jnp.int32(0), row)[0]["key"] for row in rows]
        return [np.asarray(array) for array in [*jax.tree.leaves(self.state), *pages, self.pool]]


def save(path, served, **changes):
    arguments = {"config": CONFIG, "state": served.state, "pools": {"kv": served.pool}, "layouts": {"kv": LAYOUT}}
    checkpoint.save(path, **{**arguments, **changes})


def test_a_restored_run_goes_on_as_one_that_did_not_stop(tmp_path):
    straight, stopped = Serving(), Serving()
    for number in range(9):
        straight.step(number)
        stopped.step(number)
    save(tmp_path / "c", stopped, notes={"next": "9"})
    del stopped
    found = checkpoint.restore(tmp_path / "c", CONFIG, {"kv": LAYOUT})
    resumed = Serving()
    resumed.state, resumed.pool = jax.tree.map(jnp.asarray, (found.state, found.pools["kv"]))
    for number in range(int(found.notes["next"]), 25):
        straight.step(number)
        resumed.step(number)
    for one, other in zip(straight.content(), resumed.content(), strict=True):
        np.testing.assert_array_equal(one, other)
    assert np.asarray(straight.pool).any()


def test_the_sequential_cache_goes_on_likewise(tmp_path):
    parameters, state = cache.init(CONFIG, cache.buckets_for(CONFIG, requests=8, keys=64))

    def run(state, numbers):
        answers = []
        for number in numbers:
            slot, batch = number % 4, Batch()
            batch.add(Code.REQUEST, slot, [1, 2, 3 + slot], tokens=7).add(Code.LOOKUP, slot)
            batch.add(Code.ALLOCATE, slot, new=-1, hit=-1, advance=1)
            if number > 2:
                batch.add(Code.FREE, (number + 1) % 4).add(Code.DROP, (number + 1) % 4)
            state, results = cache.run(parameters, state, batch.build(), ids=256)
            answers.append(jax.tree.map(np.asarray, results))
        return state, answers

    state, _ = run(state, range(6))
    checkpoint.save(tmp_path / "c", CONFIG, state)
    found = checkpoint.restore(tmp_path / "c", CONFIG).state
    leaves = [jax.tree.leaves(run(each, range(6, 14))) for each in (state, found)]
    for one, other in zip(*leaves, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float32", "uint8"])
def test_pages_come_back_bit_for_bit(tmp_path, dtype):
    raw = np.random.default_rng(0).integers(0, 256, 4 * BLOCKS, np.uint8)
    pool = raw.view(jnp.dtype(dtype)).reshape(BLOCKS, -1)
    save(tmp_path / "c", Serving(), pools={"kv": pool})
    found = checkpoint.restore(tmp_path / "c", CONFIG, {"kv": LAYOUT}).pools["kv"]
    assert found.dtype == pool.dtype
    assert found.shape == pool.shape
    assert found.tobytes() == pool.tobytes()


def test_another_configuration_is_refused_by_the_name_of_what_differs(tmp_path):
    save(tmp_path / "c", Serving())
    other = dataclasses.replace(CONFIG, max_model_len=128)
    with pytest.raises(ConfigError, match=r"config\.max_model_len = 128: expected 64, as in the checkpoint"):
        checkpoint.restore(tmp_path / "c", other, {"kv": LAYOUT})
    other = build("full:2,swa:2:8", num_blocks=BLOCKS, max_model_len=64)
    with pytest.raises(ConfigError, match=r"config\.topology\.groups\[1\]\.spec\.window = 8: expected 4"):
        checkpoint.restore(tmp_path / "c", other, {"kv": LAYOUT})
    with pytest.raises(ConfigError, match=r"config\.topology\.groups = "):
        checkpoint.restore(tmp_path / "c", build("full:2", num_blocks=BLOCKS, max_model_len=64), {"kv": LAYOUT})


def test_another_layout_is_refused_even_of_the_same_shape(tmp_path):
    save(tmp_path / "c", Serving())
    other = Layout.of_spec(SPEC, "LBNHC", num_blocks=BLOCKS)
    assert other.shape == LAYOUT.shape
    with pytest.raises(LayoutError, match=re.escape("layouts.kv.order = 'LBNHC': expected 'LBHNC'")):
        checkpoint.restore(tmp_path / "c", CONFIG, {"kv": other})
    with pytest.raises(LayoutError, match="layouts = "):
        checkpoint.restore(tmp_path / "c", CONFIG)


def test_fingerprints_tell_configurations_and_layouts_apart():
    assert checkpoint.fingerprint(CONFIG) == checkpoint.fingerprint(dataclasses.replace(CONFIG))
    others = [dataclasses.replace(CONFIG, caching=False), LAYOUT, Layout.of_spec(SPEC, "LBNHC", num_blocks=BLOCKS)]
    assert len({checkpoint.fingerprint(value) for value in [CONFIG, *others]}) == 4
    bugs = [frozenset({"a", "b"}), frozenset({"b", "a"})]
    assert checkpoint.describe(bugs[0]) == checkpoint.describe(bugs[1]) == ["a", "b"]
    with pytest.raises(OperationError, match="value = 'object'"):
        checkpoint.describe(object())


def test_damaged_files_are_refused(tmp_path):
    path = tmp_path / "c"
    save(path, Serving())
    whole = path.read_bytes()
    for place in (len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(FileError, match="damaged"):
            checkpoint.restore(path, CONFIG, {"kv": LAYOUT})
    for content in (whole[:100], whole[:-1], b""):
        path.write_bytes(content)
        with pytest.raises(FileError, match="a checkpoint that can be read"):
            checkpoint.restore(path, CONFIG, {"kv": LAYOUT})
    path.unlink()
    with pytest.raises(FileError, match="a checkpoint that can be read"):
        checkpoint.restore(path, CONFIG, {"kv": LAYOUT})


def test_another_file_of_the_same_library_is_no_checkpoint(tmp_path):
    import safetensors.numpy

    safetensors.numpy.save_file({"x": np.zeros(3)}, tmp_path / "c")
    with pytest.raises(FileError, match="format = None: expected hkv-checkpoint-2"):
        checkpoint.restore(tmp_path / "c", CONFIG)


def test_a_save_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    served = Serving()
    save(tmp_path / "c", served)
    before = (tmp_path / "c").read_bytes()
    served.step(0)

    def broken(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", broken)
    with pytest.raises(FileError, match="No space left"):
        save(tmp_path / "c", served)
    assert (tmp_path / "c").read_bytes() == before
    assert os.listdir(tmp_path) == ["c"]


def test_misuse_is_named(tmp_path):
    served = Serving()
    with pytest.raises(FileError, match="a path that can be written"):
        save(tmp_path / "no" / "c", served)
    with pytest.raises(OperationError, match="layouts = "):
        save(tmp_path / "c", served, layouts={})
    with pytest.raises(OperationError, match="state = 'dict'"):
        save(tmp_path / "c", served, state={})
    assert os.listdir(tmp_path) == []
