"""The layers themselves, for any number of rows and new tokens; where earlier tokens are kept is a `Store`'s business.

Shapes: R rows, T new tokens of each, S tokens to look back at; everything is float32.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from examples.hybrid_decoder.arithmetic import contract, rounded, total
from examples.hybrid_decoder.model import DELTA, Model, Weights

Parts = dict[str, jax.Array]
"""Parts that attention keeps of tokens: `key` and `value`, or `latent`, each [R, T or S, heads, elements]."""


class State(NamedTuple):
    """State of a recurrent layer for a row: `inputs` [..., taps - 1, channels], `memory` [..., heads, head, head]."""

    inputs: jax.Array
    memory: jax.Array


class Store(Protocol):
    """Storage for what layers need of earlier tokens."""

    def attention(self, layer: int, new: Parts) -> Parts:
        """Takes the parts of the new tokens [R, T, ...]; gives those of positions 0 to S - 1 of each row."""
        ...

    def by_kernel(self, layer: int, query: jax.Array, readers: jax.Array) -> jax.Array | None:
        """Attention of queries [R, T, heads, k] at int32[R, T] to all tokens up to theirs; None if that takes `attend`.

        Returns sums of whole cells, key and value or latent, [R, T, heads, cell].
        """
        ...

    def recurrence(self, layer: int) -> State:
        """The state before each row's first new token."""
        ...

    def keep(self, layer: int, states: State) -> None:
        """Takes the states [T + 1, R, ...] after 0, 1, ... T new tokens."""
        ...


def logits_of(
    model: Model, weights: list[Weights], tokens: jax.Array, positions: jax.Array, counts: jax.Array, store: Store
) -> jax.Array:
    """Logits [R, T, vocabulary] of new tokens int32[R, T] at `positions`, of which `counts` int32[R] are real."""
    x = weights[0]["embedding"][tokens]
    live = jnp.arange(tokens.shape[1]) < counts[:, None]
    readers = jnp.where(live, positions, -1)
    turn = {name: weights[0][name][positions][:, :, None] for name in ("cos", "sin")}
    for index, layer in enumerate(weights):
        inner = normal(model, x)
        if model.layers[index] == DELTA:
            found = delta(model, layer, inner, counts, store, index)
        elif model.layers[index] == "mla":
            found = latent_attention(model, layer, inner, readers, turn, store, index)
        else:
            found = attention(model, layer, inner, readers, turn, store, index)
        x = x + dense(model, found, layer["out"])
        x = x + dense(model, jax.nn.silu(dense(model, normal(model, x), layer["up"])), layer["down"])
    return dense(model, normal(model, x), weights[0]["embedding"].T)


def dense(model: Model, x: jax.Array, matrix: jax.Array) -> jax.Array:
    """`x @ matrix`."""
    return contract(model.exact, "rti,io->rto", x, matrix)


def normal(model: Model, x: jax.Array) -> jax.Array:
    """Root-mean-square normalisation of the last axis."""
    factor = rounded(x) if model.exact else x
    return x * jax.lax.rsqrt(total(model.exact, factor * factor) / x.shape[-1] + 1e-6)[..., None]


def rotate(model: Model, x: jax.Array, turn: Parts) -> jax.Array:
    """Rotary embedding of [R, T, heads, head]."""
    cos, sin = turn["cos"], turn["sin"]
    if model.exact:
        x, cos, sin = rounded(x), rounded(cos), rounded(sin)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)


# Attention.


def allowed(model: Model, kind: str, query: jax.Array, key: jax.Array) -> jax.Array:
    """Mask bool[R, T, S] of positions int32[S] that queries at int32[R, T] read, their own included; at -1 none."""
    query = query[..., None]
    read = key <= query
    if kind == "window":
        return read & (key > query - model.window)
    if kind == "chunked":
        return read & (key >= query - query % model.chunk)
    return read


def scale_of(size: int) -> float:
    """Factor for the scores of keys of `size` elements: a power of two, which rounds nothing."""
    return 2.0 ** -round(np.log2(size) / 2)


def attend(model: Model, query: jax.Array, key: jax.Array, value: jax.Array, read: jax.Array) -> jax.Array:
    """Grouped-query attention. Keys and values that no query reads may be anything, NaN too.

    Args:
      model: the sizes.
      query: [R, T, heads, k].
      key: [R, S, kv heads, k].
      value: [R, S, kv heads, v].
      read: bool[R, T, S].

    Returns:
      [R, T, heads, v].
    """
    rows, new, heads, size = query.shape
    query = query.reshape(rows, new, key.shape[2], -1, size)
    scores = contract(model.exact, "rtkgd,rskd->rtkgs", query, key) * scale_of(size)
    read = read[:, :, None, None, :]
    scores = jnp.where(read, scores, -jnp.inf)
    scores = jnp.exp(scores - jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), -1e30))
    used = jnp.any(read, axis=(1, 2, 3))
    value = jnp.where(used[:, :, None, None], value, 0)
    sums = contract(model.exact, "rtkgs,rskv->rtkgv", scores, value)
    found = sums / jnp.maximum(total(model.exact, scores), 1e-30)[..., None]
    return found.reshape(rows, new, heads, -1)


def attention(
    model: Model, layer: Weights, x: jax.Array, readers: jax.Array, turn: Parts, store: Store, index: int
) -> jax.Array:
    """Grouped-query attention of normalised inputs [R, T, width]: full, over a window, or within a chunk."""
    query, key, value = (
        dense(model, x, layer[name]).reshape(*x.shape[:2], -1, model.head) for name in ("query", "key", "value")
    )
    kept = store.attention(index, {"key": rotate(model, key, turn), "value": value})
    query = rotate(model, query, turn)
    found = store.by_kernel(index, query, readers)
    if found is None:
        read = allowed(model, model.layers[index], readers, jnp.arange(kept["key"].shape[1]))
        found = attend(model, query, kept["key"], kept["value"], read)
    return found[..., -model.head :].reshape(*x.shape)


def latent_attention(
    model: Model, layer: Weights, x: jax.Array, readers: jax.Array, turn: Parts, store: Store, index: int
) -> jax.Array:
    """Attention over one compressed latent a token, with the projections of keys and values absorbed into the query's
    and the output's, as engines compute it in decode.
    """
    rank = model.latent - model.head
    query = dense(model, x, layer["query"]).reshape(*x.shape[:2], model.heads, 2 * model.head)
    inner = contract(model.exact, "rthd,hdl->rthl", query[..., : model.head], layer["key"])
    query = jnp.concatenate([inner, rotate(model, query[..., model.head :], turn)], axis=-1)
    cell = dense(model, x, layer["latent"])[:, :, None]
    cell = jnp.concatenate([normal(model, cell[..., :rank]), rotate(model, cell[..., rank:], turn)], axis=-1)
    kept = store.attention(index, {"latent": cell})["latent"]
    found = store.by_kernel(index, query, readers)
    if found is None:
        read = allowed(model, "mla", readers, jnp.arange(kept.shape[1]))
        found = attend(model, query, kept, kept[..., :rank], read)
    return contract(model.exact, "rthl,hld->rthd", found[..., :rank], layer["value"]).reshape(*x.shape)


# Recurrence.


def delta(model: Model, layer: Weights, x: jax.Array, counts: jax.Array, store: Store, index: int) -> jax.Array:
    """A gated delta net behind a short causal convolution, token by token. Rows stand still after `counts` tokens."""
    mixed = dense(model, x, layer["mixed"])
    gates = {name: jax.nn.sigmoid(dense(model, x, layer[name]) + bias) for name, bias in (("decay", 2), ("rate", 0))}
    before = store.recurrence(index)

    def token(state: State, inputs: tuple[jax.Array, ...]) -> tuple[State, tuple[State, jax.Array]]:
        live, new, decay, rate = inputs
        after, found = delta_token(model, layer["taps"], state, new, decay, rate)
        after = jax.tree.map(lambda a, b: jnp.where(live.reshape(-1, *[1] * (a.ndim - 1)), a, b), after, state)
        return after, (after, found)

    live = jnp.arange(x.shape[1])[:, None] < counts
    by_token = (live, *(jnp.swapaxes(array, 0, 1) for array in (mixed, gates["decay"], gates["rate"])))
    _, (states, found) = jax.lax.scan(token, before, by_token)
    store.keep(index, jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), before, states))
    found = normal(model, jnp.swapaxes(found, 0, 1)).reshape(*x.shape[:2], -1)
    return found * jax.nn.silu(dense(model, x, layer["gate"]))


def delta_token(
    model: Model, taps: jax.Array, state: State, new: jax.Array, decay: jax.Array, rate: jax.Array
) -> tuple[State, jax.Array]:
    """One token of each row: `new` [R, channels], `decay` and `rate` [R, heads]. Returns the output [R, heads, head].

    M <- decay M; M <- M + rate k (v - M k)^T; output M q. Exactly, a product of `decay`'s 8 bits and M's 16 needs no
    rounding.
    """
    exact = model.exact
    inputs = jnp.concatenate([state.inputs, new[:, None]], axis=1)
    mixed = jax.nn.silu(contract(exact, "rtc,tc->rc", inputs, taps))
    query, key, value = jnp.split(mixed.reshape(-1, 3 * model.delta_heads, model.delta_head), 3, axis=1)
    query, key = normal(model, query), normal(model, key) / np.sqrt(model.delta_head)
    memory = state.memory
    if exact:
        memory, decay = rounded(memory, 16), rounded(decay)
    memory = memory * decay[..., None, None]
    change = (value - contract(exact, "rhkv,rhk->rhv", memory, key)) * rate[..., None]
    if exact:
        key, change = rounded(key), rounded(change)
    memory = memory + key[..., None] * change[..., None, :]
    return State(inputs[:, 1:], memory), contract(exact, "rhkv,rhk->rhv", memory, query)
