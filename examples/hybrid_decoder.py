"""A decoder whose hybrid cache lives inside `jit`: full and sliding-window layers over one pool of pages.

python examples/hybrid_decoder.py

Prompts are prefilled in chunks and continued in one `lax.scan`, which carries block tables, pages and prefix keys. Then
other prompts arrive that begin like the first sequences, and reuse their pages. All logits are compared with a forward
pass that has no cache. Weights are random.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from typing import Any

import click
import jax
import jax.numpy as jnp
import numpy as np

from hkv import cache
from hkv import step as serving
from hkv.dialects.vllm.config import VllmConfig
from hkv.keys import fingerprint
from hkv.layout import Layout
from hkv.operations import Batch, Code, Column
from hkv.paged.operations import gather, write
from hkv.spec import FullAttention, SlidingWindow
from hkv.state.state import Buckets
from hkv.step_conversion import to_operations, to_steps
from hkv.step_state import StepBatch, StepRequest, StepState
from hkv.topology import Topology

Weights = dict[str, jax.Array]

ARRIVAL = (Code.REQUEST, Code.LOOKUP, Code.ALLOCATE)
"""Operations that the cache of single operations is compiled for."""


@dataclasses.dataclass(frozen=True)
class Model:
    """Sizes. Layers alternate: full attention, sliding window, full attention, ...

    Attributes:
      pairs: layers of each of the two kinds.
      window: tokens that a sliding-window query reads, its own included.
      heads: query heads.
      kv_heads: key and value heads.
      head: elements of a head.
      vocabulary: tokens.
      block: tokens in a block.
      longest: most tokens of a request.
    """

    pairs: int = 2
    window: int = 8
    heads: int = 4
    kv_heads: int = 2
    head: int = 16
    vocabulary: int = 64
    block: int = 4
    longest: int = 96

    @property
    def width(self) -> int:
        """Elements of a token's vector."""
        return self.heads * self.head

    def config(self, num_blocks: int) -> VllmConfig:
        """The cache: one group of full-attention layers, one of sliding-window layers."""
        heads = {"block_size": self.block, "num_kv_heads": self.kv_heads, "head_size": self.head, "dtype": "float32"}
        specs = [FullAttention(**heads), SlidingWindow(**heads, window=self.window)]
        sizes = {"hash_block_size": self.block, "scheduler_block_size": self.block}
        topology = Topology.of_specs(specs)
        return VllmConfig(topology=topology, num_blocks=num_blocks, max_model_len=self.longest, **sizes)

    def layout(self, config: VllmConfig) -> Layout:
        """The pages. Layer i of either group lies in the same tensor: their blocks have different ids."""
        return Layout.of_spec(config.topology.specs[0], "LBNHC", num_blocks=config.num_blocks, num_layers=self.pairs)


def weights_of(model: Model, seed: int) -> list[Weights]:
    """Random weights, a dict a layer; the first also has the embedding."""
    keys = iter(jax.random.split(jax.random.key(seed), 8 * model.pairs * 2 + 1))
    kv = model.kv_heads * model.head
    shapes = {"query": model.width, "key": kv, "value": kv, "up": 2 * model.width}

    def matrix(rows: int, columns: int) -> jax.Array:
        return jax.random.normal(next(keys), (rows, columns), jnp.float32) / np.sqrt(rows)

    layers = []
    for _ in range(2 * model.pairs):
        layer = {name: matrix(model.width, columns) for name, columns in shapes.items()}
        layers.append({**layer, "out": matrix(model.width, model.width), "down": matrix(2 * model.width, model.width)})
    layers[0]["embedding"] = matrix(model.vocabulary, model.width) * 4
    return layers


def rotate(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Rotary embedding of [..., tokens, heads, head] at positions [..., tokens]."""
    half = x.shape[-1] // 2
    angle = positions[..., None, None] / 100 ** (jnp.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)


def attend(query: jax.Array, key: jax.Array, value: jax.Array, allowed: jax.Array) -> jax.Array:
    """Grouped-query attention: [t, heads, head] over [s, kv_heads, head], where `allowed` [t, s]."""
    groups = query.shape[1] // key.shape[1]
    query = query.reshape(query.shape[0], key.shape[1], groups, -1)
    scores = jnp.einsum("tkgd,skd->kgts", query, key) / np.sqrt(query.shape[-1])
    weights = jax.nn.softmax(jnp.where(allowed, scores, -1e30), axis=-1)
    return jnp.einsum("kgts,skd->tkgd", weights, value).reshape(query.shape[0], -1)


def normal(x: jax.Array) -> jax.Array:
    """Root-mean-square normalisation."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def layer_inputs(model: Model, layer: Weights, x: jax.Array, positions: jax.Array) -> tuple[jax.Array, ...]:
    """Query, key and value of [..., tokens, width], rotated."""
    split = {name: normal(x) @ layer[name] for name in ("query", "key", "value")}
    query, key, value = (array.reshape(*x.shape[:-1], -1, model.head) for array in split.values())
    return rotate(query, positions), rotate(key, positions), value


def layer_output(layer: Weights, x: jax.Array, attended: jax.Array) -> jax.Array:
    """The layer's residual sums."""
    x = x + attended @ layer["out"]
    return x + jax.nn.gelu(normal(x) @ layer["up"]) @ layer["down"]


def allowed(model: Model, group: int, query: jax.Array, key: jax.Array) -> jax.Array:
    """Which positions a query reads, bool[t, s]."""
    causal = key[None, :] <= query[:, None]
    return causal if group == 0 else causal & (key[None, :] > query[:, None] - model.window)


@functools.partial(jax.jit, static_argnums=0)
def without_cache(model: Model, weights: list[Weights], tokens: jax.Array) -> jax.Array:
    """Logits [n, vocabulary] of a whole sequence, int32[n]."""
    positions = jnp.arange(tokens.shape[0])
    x = weights[0]["embedding"][tokens]
    for index, layer in enumerate(weights):
        query, key, value = layer_inputs(model, layer, x, positions)
        x = layer_output(layer, x, attend(query, key, value, allowed(model, index % 2, positions, positions)))
    return normal(x) @ weights[0]["embedding"].T


class Decoder:
    """Rows of requests, their cache and their pages.

    Args:
      model: the sizes.
      rows: requests at the same time.
      num_blocks: blocks in the pool.
      chunk: tokens of a prefill step.
      seed: of the weights.

    Attributes:
      state, pool: the cache and its pages.
      held: blocks that each group held at the end of the last `generate`.
    """

    def __init__(self, model: Model, rows: int, num_blocks: int, chunk: int = 8, seed: int = 0) -> None:
        self.model, self.rows, self.chunk = model, rows, chunk
        self.config = model.config(num_blocks)
        self.layout = model.layout(self.config)
        self.weights = weights_of(model, seed)
        width = -(-model.longest // model.block)
        self.buckets = Buckets(blocks=num_blocks, requests=rows, groups=4, row=width, chain=width + 1, keys=4096)
        self.parameters, self.state = serving.init(self.config, rows=rows, row=width, chain=width + 1)
        words = self.layout.num_blocks * self.layout.page_size * model.pairs // 4
        self.pool = jnp.zeros(words, jnp.uint32)
        self.numbers: dict[bytes, int] = {}
        self.held = np.zeros(2, np.int64)
        self.forward = jax.jit(self._forward, donate_argnums=(1, 2))
        self.decode = jax.jit(self._decode, donate_argnums=(1, 2), static_argnames="steps")

    def _forward(
        self, weights: list[Weights], state: StepState, pool: jax.Array, tokens: jax.Array, counts: jax.Array
    ) -> tuple[StepState, jax.Array, jax.Array, jax.Array]:
        """New tokens int32[R, T] of every row: one step of the cache, then the layers. Returns logits [R, T, V]."""
        zeros = jnp.zeros(self.rows, jnp.int32)
        before = state.requests[:, StepRequest.COMPUTED]
        room = self.rows * 2 * self.buckets.row
        state, result = serving.step(self.parameters, state, StepBatch(tokens, counts, zeros, zeros), room=room)
        positions = before[:, None] + jnp.arange(tokens.shape[1])
        held = jnp.arange(self.buckets.row * self.model.block)
        x = weights[0]["embedding"][tokens]
        for index, layer in enumerate(weights):
            group, at = index % 2, jnp.int32(index // 2)
            query, key, value = layer_inputs(self.model, layer, x, positions)
            parts = {"key": key.reshape(-1, *key.shape[2:]), "value": value.reshape(-1, *value.shape[2:])}
            slots = result.blocks[:, group].reshape(-1), result.offsets[:, group].reshape(-1)
            pool, _ = write(pool, self.layout, at, *slots, parts)

            def row(query: Any, table: Any, positions: Any, at: Any = at, group: int = group, pool: Any = pool) -> Any:
                pages, _ = gather(pool, self.layout, at, table)
                return attend(query, pages["key"], pages["value"], allowed(self.model, group, positions, held))

            x = layer_output(layer, x, jax.vmap(row)(query, state.rows[:, group], positions))
        return state, pool, normal(x) @ weights[0]["embedding"].T, result.status

    def _decode(
        self, weights: list[Weights], state: StepState, pool: jax.Array, last: jax.Array, counts: jax.Array, steps: int
    ) -> tuple[StepState, jax.Array, tuple[jax.Array, ...]]:
        """`steps` tokens of every row with a count, greedily. Returns tokens [steps, R], logits and statuses."""

        def one(carry: Any, _: None) -> tuple[Any, Any]:
            state, pool, last = carry
            state, pool, logits, status = self._forward(weights, state, pool, last[:, None], counts)
            new = jnp.argmax(logits[:, 0], axis=-1).astype(jnp.int32)
            return (state, pool, new), (new, logits[:, 0], status)

        (state, pool, _), out = jax.lax.scan(one, (state, pool, last), length=steps)
        return state, pool, out

    def arrive(self, prompts: list[list[int]]) -> list[int]:
        """Requests arrive in the rows, which are empty. Returns how many tokens each finds in the cache."""
        found = self._numbered_fingerprints(prompts)
        parameters, _ = cache.init(self.config, self.buckets)
        state = to_operations(self.config, self.state, self.buckets, self._number)
        hits = []
        for row, prompt in enumerate(prompts):
            batch = Batch().add(Code.REQUEST, row, found[row], tokens=len(prompt)).add(Code.LOOKUP, row)
            state, results = cache.run(parameters, state, batch.build(), only=ARRIVAL)
            hits.append(int(results.table[1, Column.VALUE]))
            if hits[-1]:
                adopt = Batch().add(Code.LOOKUP, row).add(Code.ALLOCATE, row, hit=-1, new=0, advance=1).build()
                state, results = cache.run(parameters, state, adopt, only=ARRIVAL)
                assert not np.asarray(results.table)[:2, Column.STATUS].any(), "a hit was refused"
        keys = np.array([np.frombuffer(key, "<u4") for key in self.numbers], np.uint32).reshape(-1, 4)
        self.state = to_steps(self.config, state, keys, [[] for _ in range(self.rows)])
        return hits

    def generate(self, prompts: list[list[int]], steps: int) -> tuple[list[list[int]], list[np.ndarray], list[int]]:
        """Arrivals, prefill, decoding, the end: whole sequences, the logits that were computed for each, and hits."""
        hits = self.arrive(prompts)
        at = np.array(hits)
        lengths = np.array([len(prompt) for prompt in prompts])
        logits: list[list[np.ndarray]] = [[] for _ in prompts]
        while (at < lengths - 1).any():
            counts = np.clip(lengths - 1 - at, 0, self.chunk).astype(np.int32)
            tokens = np.zeros((self.rows, self.chunk), np.int32)
            for row, prompt in enumerate(prompts):
                tokens[row, : counts[row]] = prompt[at[row] : at[row] + counts[row]]
            self.state, self.pool, out, status = self.forward(self.weights, self.state, self.pool, tokens, counts)
            assert not np.asarray(status).any(), "a row was refused"
            for row, count in enumerate(counts):
                logits[row].append(np.asarray(out[row, :count]))
            at += counts
        last = np.array([prompt[-1] for prompt in prompts], np.int32)
        ones = np.ones(self.rows, np.int32)
        self.state, self.pool, (new, out, status) = self.decode(
            self.weights, self.state, self.pool, last, ones, steps=steps
        )
        assert not np.asarray(status).any(), "a row was refused"
        sequences = [[*prompt, *np.asarray(new[:, row]).tolist()] for row, prompt in enumerate(prompts)]
        whole = [np.concatenate([*logits[row], np.asarray(out[:, row])]) for row in range(len(prompts))]
        self.held = np.count_nonzero(np.asarray(self.state.rows), axis=(0, 2))
        self.state, _ = serving.finish(self.state, np.arange(self.rows, dtype=np.int32))
        return sequences, whole, hits

    def _number(self, key: bytes) -> int:
        return self.numbers.setdefault(key, len(self.numbers))

    def _numbered_fingerprints(self, prompts: list[list[int]]) -> list[list[int]]:
        size = self.model.block
        found = []
        for prompt in prompts:
            whole = jnp.array(prompt[: len(prompt) // size * size], jnp.int32).reshape(-1, size)
            keys = np.asarray(fingerprint.keys(whole, jnp.array(fingerprint.ROOT, jnp.uint32)))
            found.append([self._number(key.astype("<u4").tobytes()) for key in keys])
        return found


def largest_error(decoder: Decoder, sequences: list[list[int]], logits: list[np.ndarray], hits: list[int]) -> float:
    """The largest difference of any logit from the forward pass without a cache."""
    worst = 0.0
    for sequence, found, hit in zip(sequences, logits, hits, strict=True):
        exact = np.asarray(without_cache(decoder.model, decoder.weights, jnp.array(sequence[:-1], jnp.int32)))
        assert len(found) == len(exact) - hit, "logits are missing"
        worst = max(worst, float(np.abs(found - exact[hit:]).max()))
    return worst


@click.command()
@click.option("--rows", default=4, show_default=True, help="Requests at the same time.")
@click.option("--steps", default=40, show_default=True, help="Tokens to generate.")
@click.option("--seed", default=0, show_default=True, help="Of weights and prompts.")
def main(rows: int, steps: int, seed: int) -> None:
    """Generates twice: first from new prompts, then from prompts that begin like the first sequences."""
    model = Model()
    if not 1 <= steps <= model.longest - 40:
        raise click.UsageError(f"--steps {steps}: 1 to {model.longest - 40} were expected")
    decoder = Decoder(model, rows, num_blocks=2 * rows * (-(-model.longest // model.block)) + 1, seed=seed)
    draw = np.random.default_rng(seed)
    prompts = [draw.integers(0, model.vocabulary, int(draw.integers(9, 24))).tolist() for _ in range(rows)]
    for name in ("new prompts", "prompts that begin like those sequences"):
        start = time.perf_counter()
        sequences, logits, hits = decoder.generate(prompts, steps)
        seconds = time.perf_counter() - start
        error = largest_error(decoder, sequences, logits, hits)
        click.echo(f"{name}: {rows * steps} tokens in {seconds:.2f} s, compilation included; tokens found: {hits}")
        click.echo(f"  largest difference of a logit from the pass without a cache: {error:.1e}")
        kib = decoder.held * decoder.layout.page_size * model.pairs / 1024
        click.echo(f"  pages held at the end: {kib.sum():.0f} KiB; with full attention in every layer {2 * kib[0]:.0f}")
        prompts = [[*sequence[:-20], *draw.integers(0, model.vocabulary, 5).tolist()] for sequence in sequences]
        prompts = [prompt[: model.longest - steps] for prompt in prompts]


if __name__ == "__main__":
    main()
