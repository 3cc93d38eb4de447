"""A JAX serving experiment: from a model's config to its plan, its cache inside `jit`, and its bytes.

Example: python examples/serving_experiment.py tests/data/models/gemma3_text.json
"""

# jax.numpy types some of its own arguments as unknown.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp

import hkv

ROWS, PROMPT = 4, 40


def main(path: str) -> None:
    """Plans a model, serves two requests with a common prompt, and writes one layer's keys and values."""
    model = hkv.read_model(path)
    plan = hkv.plan(model, "8GiB", max_model_len=2048)
    print(f"{model.model_type}: {plan.num_blocks} blocks, groups of {plan.groups['kind'].tolist()}")

    specs = [hkv.FullAttention(block_size=8, num_kv_heads=2, head_size=16), hkv.SlidingWindow(block_size=8, window=16)]
    config = hkv.cache_config(hkv.Topology.of_specs(specs), num_blocks=64, max_model_len=256)
    cache = hkv.init(config, rows=ROWS, row_blocks=32)
    prompt = jnp.arange(PROMPT)
    cache, first = hkv.allocate(cache, 0, prompt)
    print(f"longest hit of the same prompt: {hkv.longest_hit(cache, prompt).length} tokens")
    cache, second = hkv.allocate(cache, 1, prompt)
    print(f"request 1 found {second.hit}, request 0 {first.hit}")

    @jax.jit
    def decode(cache: hkv.Cache) -> hkv.Cache:
        """Eight tokens of both requests, without leaving the device."""
        ends = jnp.array([0, 1, 2, 2, 2])

        def body(_: int, cache: hkv.Cache) -> hkv.Cache:
            return hkv.step(cache, jnp.zeros(ROWS, jnp.int32), ends)[0]

        return jax.lax.fori_loop(0, 8, body, cache)

    cache = decode(cache)
    print(f"computed {cache.computed[:2].tolist()} tokens")

    layout = hkv.Layout.of_spec(specs[0], "LBHNC", num_blocks=64, num_layers=1)
    pool = jnp.zeros(layout.end // 4, jnp.uint32)
    keys = jnp.ones((PROMPT, 2, 16), jnp.bfloat16)
    pool, missed = hkv.write(pool, layout, 0, first.blocks[0], first.offsets[0], {"key": keys, "value": keys})
    read, _ = hkv.gather(pool, layout, 0, cache.tables[0, 0, :5])
    print(f"wrote {PROMPT - int(missed)} tokens, read back {read['key'].shape[0]}")
    cache, _ = hkv.free(cache, 0)
    print(f"{cache.free_blocks} blocks free")


if __name__ == "__main__":
    main(sys.argv[1])
