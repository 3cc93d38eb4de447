"""One of two processes that share a mesh: `python -m tests.slow.sharding.process PORT INDEX`.

`test_processes.py` starts both. It does what it is asked to on its own four devices, compares its own ranks' bytes, and
what is assembled from both processes, with the loops over one device's pool, and prints DONE.
"""

from __future__ import annotations

import sys

import jax
import numpy as np
import pytest

import reference.paged.operations as reference
from hkv.errors import ConfigError
from hkv.layout.views.numpy import numpy_dtype
from hkv.mesh import sharding
from hkv.mesh.parallel_shape import ParallelShape
from hkv.mesh.resharding import Side, plan_resharding
from hkv.mesh.sharding import ShardedLayout, make_mesh
from hkv.mesh.transfer import execute
from tests.slow.sharding.cases import Case, make_case

NO_COLLECTIVES = "this build of JAX has no collectives between CPU processes"
SHAPE = ParallelShape(heads=4, tensor=2, context=4, interleave=2)
STATES, TOKENS = 16, 40


def start(port: int, index: int) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        f"127.0.0.1:{port}",
        num_processes=2,
        process_id=index,
        initialization_timeout=60,
        heartbeat_timeout_seconds=20,
        shutdown_timeout_seconds=20,
    )


def across_processes() -> list:
    """Devices so that both context and tensor ranks that talk to each other are in different processes."""
    mine, others = (sorted((d for d in jax.devices() if d.process_index == i), key=lambda d: d.id) for i in (0, 1))
    return [device for pair in zip(mine, others, strict=True) for device in pair]


def check(case: Case, devices: list) -> None:
    sharded = ShardedLayout(make_mesh(case.shape, devices), case.shape, case.layout)
    whole, pools = case.random_pools(1)
    values, table = case.random_values(TOKENS, 2), [3, 1, 4]
    slots = np.random.default_rng(3).permutation(5 * STATES)[:TOKENS]
    blocks, states = slots // STATES, slots % STATES
    pool = jax.make_array_from_callback(pools.shape, sharded.sharding, lambda index: pools[index])
    pool, dropped = sharding.write(pool, sharded, np.int32(1), np.int32([blocks]), np.int32([states]), values)
    pool, copied = sharding.copy_blocks(pool, sharded, np.int32([[1, 2]]), np.int32([[2, 3]]))
    pool, cleared = sharding.zero_blocks(pool, sharded, np.int32([[4]]))
    found, missing = sharding.gather(pool, sharded, np.int32(1), np.int32([table]))
    assert not any(np.asarray(count).any() for count in (dropped, copied, cleared, missing))
    own = {name: content[0] for name, content in values.items()}
    reference.write(whole[0], case.whole, 1, blocks.tolist(), states.tolist(), own)
    reference.copy_blocks(whole[0], case.whole, [1, 2], [2, 3])
    reference.zero_blocks(whole[0], case.whole, [4])
    dtypes = {part.name: numpy_dtype(part.dtype) for part in case.layout.content}
    expected, _ = reference.gather(whole[0], case.whole, 1, table, dtypes)
    for name, content in expected.items():
        assert np.asarray(found[name])[0].tobytes() == content.tobytes()
    case.spread(whole, pools)
    shards = pool.addressable_shards
    assert len(shards) == 4
    for shard in shards:
        assert np.asarray(shard.data).tobytes() == pools[shard.index].tobytes()


def refuses_to_reshard(case: Case) -> None:
    """One process cannot move what another one holds: that takes a transfer library, which the plan is data for."""
    sharded = ShardedLayout(make_mesh(case.shape), case.shape, case.layout)
    side = Side(shape=case.shape, layout=case.layout, row=(1, 2))
    pool = sharded.zeros(case.layout.end, np.uint8)
    with pytest.raises(ConfigError, match="source_pool = 'devices of several processes'"):
        execute(plan_resharding(side, side, range(4)), pool, sharded, pool, sharded)


def main() -> None:
    port, index = map(int, sys.argv[1:])
    try:
        start(port, index)
        count = len(jax.devices())
    except jax.errors.JaxRuntimeError as error:
        if "make_gloo_tcp_collectives" not in str(error):
            raise
        print(NO_COLLECTIVES)
        return
    assert count == 8, f"{count} devices"
    assert len(jax.local_devices()) == 4
    check(make_case(SHAPE), jax.devices())
    check(make_case(SHAPE), across_processes())
    refuses_to_reshard(make_case(SHAPE))
    jax.distributed.shutdown()
    print("DONE")


if __name__ == "__main__":
    main()
