"""Nothing to move, and ids that int32 cannot hold: nothing wraps to another block, a state, a row, or a position."""

# pyright: basic

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hkv import paged
from hkv.block_tables import rows as block_rows
from hkv.block_tables import slots
from hkv.chunks.formats import EngineKVFormat
from hkv.chunks.kernel_groups import PageGeometry
from hkv.chunks.objects import Region
from hkv.chunks.transfer import Transfer, pack
from hkv.errors import OperationError
from hkv.layout.views.numpy import numpy_dtype
from hkv.typed_jit import NO_ID, Ids, typed_jit
from tests.paged.test_operations import LAYOUTS, bits, pool_of, values_of

CODE = ("xla", "pallas_triton:interpret")
WIDE = {
    "2^32 + 1 as int64": np.int64(2**32 + 1),
    "-2^32 + 1 as int64": np.int64(-(2**32) + 1),
    "2^64 - 1 as uint64": np.uint64(2**64 - 1),
    "2^32 - 1 as uint32": np.uint32(2**32 - 1),
}
"""Ids that end in 1 or -1 where they are cut to 32 bits, a real block, or padding."""


def nothing(dtype=np.int32):
    return np.zeros(0, dtype)


@pytest.mark.parametrize("implementation", CODE)
@pytest.mark.parametrize("name", LAYOUTS)
def test_nothing_is_moved(name: str, implementation: str) -> None:
    layout, none = LAYOUTS[name], nothing()
    before = pool_of(layout, 1)
    values = values_of(layout, 0, 1)
    moved = {
        "write": lambda pool: paged.write(pool, layout, 0, none, none, values, implementation),
        "scatter": lambda pool: paged.scatter(pool, layout, 0, none, values, implementation=implementation),
        "copy": lambda pool: paged.copy_blocks(pool, layout, none, none, implementation),
        "zero": lambda pool: paged.zero_blocks(pool, layout, none, implementation),
    }
    for operation, move in moved.items():
        after, dropped = move(before.copy())
        assert (bits(after), int(dropped)) == (bits(before), 0), operation
    found, dropped = paged.gather(before, layout, 0, none, implementation=implementation)
    assert int(dropped) == 0
    for part in layout.content:
        assert (found[part.name].shape[0], found[part.name].dtype) == (0, numpy_dtype(part.dtype))
        assert found[part.name].shape[1:] == values[part.name].shape[1:]


def test_attention_of_no_query() -> None:
    layout = LAYOUTS["one head, float32"]
    query, table = np.zeros((0, 1, 5), np.float32), np.zeros((0, 2), np.int32)
    found = paged.attention(pool_of(layout, 1), layout, 0, query, table, np.zeros(1, np.int32), nothing())
    assert jax.tree.leaves(found)[0].shape[0] == 0


@pytest.mark.parametrize("name", WIDE)
def test_a_wide_id_is_no_block(name: str) -> None:
    """On the host, and as an array of JAX's where it can be one: dropped and counted, whichever argument it is."""
    layout, wide = LAYOUTS["one head, float32"], WIDE[name]
    before, one, zero = pool_of(layout, 1), np.int32([1]), np.int32([0])
    values, block = values_of(layout, 1, 1), values_of(layout, layout.states_per_block, 1)
    forms = [np.array([wide])]
    if wide.dtype == np.uint32:
        forms.append(jnp.array([wide]))
    for ids in forms:
        moved = {
            "write to a block": lambda pool, ids=ids: paged.write(pool, layout, 0, ids, zero, values),
            "write to a state": lambda pool, ids=ids: paged.write(pool, layout, 0, one, ids, values),
            "write to a layer": lambda pool, ids=ids: paged.write(pool, layout, ids[0], one, zero, values),
            "scatter": lambda pool, ids=ids: paged.scatter(pool, layout, 0, ids, block),
            "copy from": lambda pool, ids=ids: paged.copy_blocks(pool, layout, ids, np.int32([2])),
            "copy to": lambda pool, ids=ids: paged.copy_blocks(pool, layout, np.int32([2]), ids),
            "zero": lambda pool, ids=ids: paged.zero_blocks(pool, layout, ids),
            "write of a step": lambda pool, ids=ids: _of_step(pool, layout, ids, zero, values),
        }
        for operation, move in moved.items():
            after, dropped = move(before.copy())
            assert (bits(after), int(dropped)) == (bits(before), 1), operation
        found, dropped = paged.gather(before, layout, 0, ids)
        assert not any(np.asarray(part).view(np.uint8).any() for part in found.values())
        assert int(dropped) == 1


def _of_step(pool, layout, blocks, states, values):
    several = {name: content[None] for name, content in values.items()}
    (after,), dropped = paged.write_step((pool,), (layout,), (blocks,), (states,), (several,))
    return after, dropped


@pytest.mark.parametrize("name", WIDE)
def test_a_wide_number_is_no_row_and_no_slot(name: str) -> None:
    wide = np.array([WIDE[name]])
    rows = block_rows.init_rows(2, 4)
    _, status = block_rows.append(rows, np.int32(0), wide, np.int32(1))
    assert int(status) != 0
    rows = block_rows.init_rows(2, 4)
    _, status = block_rows.append(rows, wide[0], np.int32([3]), np.int32(1))
    assert int(status) != 0
    number, dropped = slots.linear_slots(slots.Slots(np.int32([1]), np.int32([1])), np.int32(4))
    assert (int(number[0]), int(dropped.blocks)) == (5, 0)
    _, _, dropped = slots.batch_tokens(np.int32([0]), wide, np.int32([1]), size=2)
    assert int(dropped.positions) + int(dropped.rows) == 1


@pytest.mark.parametrize("name", WIDE)
def test_a_wide_id_is_no_chunk(name: str) -> None:
    geometry = PageGeometry(EngineKVFormat.NL_X_TWO_NB_BS_NH_HS, 2, 1, 2, 2, 2, 2, "float32", 0)
    region = Region(0, 0, 4, (2, 1, 4, 4), "float32", 128)
    tensors = (np.ones((4, geometry.page_stride_bytes), np.uint8),)
    objects = np.zeros((1, 128), np.uint8)
    after, dropped = pack(
        Transfer(geometry, region), tensors, objects, np.array([0, WIDE[name]], WIDE[name].dtype), np.int32(1)
    )
    assert int(dropped) == 1
    assert not np.asarray(after).any()


def test_content_that_is_too_wide_is_refused() -> None:
    """Two prompts that differ in the upper half of a token would be one."""

    @typed_jit()
    def first(tokens: jax.Array) -> jax.Array:
        return tokens[0]

    assert int(first(np.array([5], np.int64))) == 5
    with pytest.raises(OperationError, match=r"tokens = 'int64\[1\]': expected numbers that int32 holds"):
        first(np.array([2**32 + 5]))
    with pytest.raises(OperationError, match=r"tokens = 'uint64\[1\]': expected numbers that uint32 holds"):
        first(np.array([2**32], np.uint64))
    assert int(first(np.array([2**32 - 5], np.uint64))) == 2**32 - 5


BITS = np.array([2**32 - 5, 2**31, 7], np.uint32)


@pytest.mark.parametrize("array", [np.asarray, jnp.asarray])
@pytest.mark.parametrize("name", ["blocks", "row", "bits", "layer"])
def test_content_keeps_its_bits_under_any_name(name: str, array: Any) -> None:
    """Numbers that int32 has not are ids that no pool has only where a parameter says that it takes ids."""

    def same(given: Any, others: Any) -> Any:
        return given, others

    def declared(annotation: Any) -> Any:
        parameters = [
            inspect.Parameter(each, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=kind)
            for each, kind in ((name, annotation), ("others", tuple[annotation, ...]))
        ]
        same.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return typed_jit()(same)

    for content in (declared(jax.Array), jax.jit(declared(jax.Array))):
        for found in jax.tree.leaves(content(array(BITS), (array(BITS),))):
            assert found.dtype == np.uint32
            assert found.tolist() == BITS.tolist()
    for ids in (declared(Ids), declared(Ids | None), jax.jit(declared(Ids))):
        for found in jax.tree.leaves(ids(array(BITS), (array(BITS),))):
            assert found.dtype == np.int32
            assert found.tolist() == [NO_ID, NO_ID, 7]


CONTENT = {
    "buffer",
    "pool",
    "pools",
    "objects",
    "query",
    "keys",
    "root",
    "roots",
    "tokens",
    "scale",
    "soft_cap",
    "sinks",
}
CONTENT |= {"key_scale", "value_scale"}


def test_all_other_arrays_of_operations_are_declared_as_ids() -> None:
    names = ("block_tables.rows", "block_tables.slots", "cache.cache", "chunks.transfer", "mesh.sharding")
    names += ("paged.operations", "paged.ragged_attention", "paged.step", "serving.tiers")
    modules = [importlib.import_module(f"hkv.{name}") for name in names]
    operations = [each for module in modules for each in vars(module).values() if hasattr(each, "_cache_size")]
    assert len(operations) > 30
    for operation in operations:
        for name, parameter in inspect.signature(operation).parameters.items():
            if re.search(r"\b(Array|ndarray)\b", str(parameter.annotation)) and "Ids" not in str(parameter.annotation):
                assert name in CONTENT, (operation, name)
