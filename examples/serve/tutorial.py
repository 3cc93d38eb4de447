"""From a checkpoint folder to tokens, with a hit: python -m examples.serve.tutorial tests/data/serve/llama."""

from __future__ import annotations

import functools
import pathlib
import sys

import jax
import jax.numpy as jnp
from jax.experimental import checkify

import hkv
from examples.serve.cached import Cached
from examples.serve.checkpoint import Weights, read_config, read_weights
from examples.serve.families import FORWARD
from hkv import serving

ROWS, LONGEST, BUDGET = 2, 64, 16
"""Requests at the same time, tokens of the longest, and tokens of a step."""


def generate(folder: pathlib.Path, prompts: list[list[int]], new: int) -> list[tuple[int, list[int]]]:
    """For each prompt the tokens that the cache had of it, and those that the model says next."""
    config, weights = read_config(folder), read_weights(folder)
    # Groups, pages and blocks follow from the config and the memory, as vLLM plans them.
    model = hkv.read_model(folder, dtype="float32", block_size=4, gdn_prefill="triton")
    plan = hkv.plan(model, "1MiB", max_model_len=LONGEST, max_in_flight_tokens=BUDGET)
    served = serving.from_plan(plan, rows=ROWS, debug=True)  # every read is checked

    @functools.partial(jax.jit, donate_argnums=0)
    @checkify.checkify
    def turn(served: serving.Serving, history: jax.Array, known: jax.Array) -> tuple[serving.Serving, jax.Array]:
        # What to compute: decodes and chunks of prefill, as far as blocks of the cache allow.
        batch = serving.schedule(served, history, known, jnp.arange(ROWS), budget=BUDGET)
        served, step = serving.step(served, batch.tokens, batch.cu_q_lens, batch.rows)
        # The model's layers write their keys, values and states to the step's slots, and read their rows' pages.
        cached = Cached(served, step, jnp.zeros_like(batch.counts))
        logits = FORWARD[config["model_type"]](config, Weights(weights), batch.tokens, step.positions, cached)
        return cached.served, jnp.argmax(logits[batch.cu_q_lens[1] - 1])

    found: list[tuple[int, list[int]]] = []
    for prompt in prompts:
        tokens, row = list(prompt), jnp.array([0])
        history = jnp.zeros((ROWS, LONGEST), jnp.int32).at[0, : len(prompt)].set(jnp.array(prompt))
        served, arrival = serving.arrive(served, row, history[:1], jnp.array([len(prompt)]))
        while len(tokens) < len(prompt) + new:
            error, (served, said) = turn(served, history, jnp.array([len(tokens), 0]))
            error.throw()
            if served.cache.computed[0] == len(tokens):  # else it was a chunk of the prompt
                history = history.at[0, len(tokens)].set(said)
                tokens.append(int(said))
        served, _ = serving.finish(served, row)  # its blocks can be found until others need them
        found.append((int(arrival.hits[0]), tokens[len(prompt) :]))
    return found


if __name__ == "__main__":
    first = list(range(3, 40))
    for hit, tokens in generate(pathlib.Path(sys.argv[1]), [first, [*first[:33], 1, 2]], new=8):
        print(f"{hit} tokens were cached; then {tokens}")
