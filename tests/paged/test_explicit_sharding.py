"""Values that an explicit mesh axis splits are refused, with a word on what to do; whole ones are written."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import hkv
from hkv.errors import LayoutError
from hkv.paged.step import write_step

SPEC = hkv.FullAttention(block_size=4, num_kv_heads=2, head_size=8, dtype="float32")
LAYOUT = hkv.Layout.of_spec(SPEC, "LBHNC", num_blocks=8)


def test_values_that_are_split_by_heads_are_refused():
    mesh = jax.make_mesh((1,), ("heads",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        split = jax.device_put(jnp.ones((3, 2, 8)), jax.NamedSharding(mesh, P(None, "heads")))
        ids, pool = jnp.arange(3), jnp.zeros(LAYOUT.end // 4, jnp.uint32)
        with pytest.raises(LayoutError, match=r"values\['key'\] = .*split as.*jax.reshard.*hkv.mesh"):
            hkv.write(pool, LAYOUT, 0, ids, ids, {"key": split, "value": split})
        with pytest.raises(LayoutError, match=r"values\['key'\] = .*split as"):
            write_step((pool,), (LAYOUT,), (ids,), (ids,), ({"key": split[None], "value": split[None]},))
        whole = jax.reshard(split, P())
        _, missed = hkv.write(pool, LAYOUT, 0, ids, ids, {"key": whole, "value": whole})
        assert missed == 0
