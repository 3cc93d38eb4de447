"""Parts that the families share: norms, linear maps, rotary positions. All in float32."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

EXACT = jax.lax.Precision.HIGHEST


def rms_norm(x: jax.Array, weight: jax.Array, epsilon: float) -> jax.Array:
    """Root-mean-square norm over the last axis, times a weight."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + epsilon) * weight


def linear(x: jax.Array, weights: Mapping[str, jax.Array], name: str) -> jax.Array:
    """`x @ weight.T`, and the bias where there is one."""
    found = jnp.matmul(x, weights[f"{name}.weight"].T, precision=EXACT)
    bias = f"{name}.bias"
    return found + weights[bias] if bias in weights else found


def gated_mlp(
    weights: Mapping[str, jax.Array], x: jax.Array, gate: Callable[..., jax.Array] = jax.nn.silu
) -> jax.Array:
    """`down_proj(gate(gate_proj(x)) * up_proj(x))`."""
    return linear(gate(linear(x, weights, "gate_proj")) * linear(x, weights, "up_proj"), weights, "down_proj")


class Rotary(NamedTuple):
    """Rotary positions of a step's tokens: cosine and sine `[tokens, 1, pairs]`, a factor among them."""

    cosine: jax.Array
    sine: jax.Array

    def __call__(self, x: jax.Array) -> jax.Array:
        """Turns heads `[tokens, heads, elements]`: a first half against a second, elements behind them stay."""
        first, second, rest = jnp.split(x, [self.cosine.shape[-1], 2 * self.cosine.shape[-1]], axis=-1)
        turned = (first * self.cosine - second * self.sine, second * self.cosine + first * self.sine, rest)
        return jnp.concatenate(turned, axis=-1)


def halves(x: jax.Array) -> jax.Array:
    """Elements whose neighbours are pairs, as halves that are pairs."""
    return jnp.concatenate([x[..., ::2], x[..., 1::2]], axis=-1)


def rotary(parameters: Mapping[str, Any], size: int, positions: jax.Array) -> Rotary:
    """Rotary positions by a config's `rope_parameters`, of heads of `size` elements.

    Raises:
      ValueError: a `rope_type` that is not known here.
    """
    base, kind = float(parameters["rope_theta"]), parameters.get("rope_type", "default")
    size = int(size * parameters.get("partial_rotary_factor", 1))
    frequencies, factor = base ** (-jnp.arange(0, size, 2, dtype=jnp.float32) / size), 1.0
    if kind == "linear":
        frequencies = frequencies / float(parameters["factor"])
    elif kind == "llama3":
        frequencies = _llama3(frequencies, parameters, float(parameters["factor"]))
    elif kind == "yarn":
        frequencies = _yarn(frequencies, parameters, float(parameters["factor"]), base, size)
        factor = yarn_scale(parameters, "mscale") / yarn_scale(parameters, "mscale_all_dim", 0)
    elif kind != "default":
        raise ValueError(f"rope_type = {kind!r}: expected default, linear, llama3 or yarn")
    angles = positions[:, None, None].astype(jnp.float32) * frequencies
    return Rotary(jnp.cos(angles) * factor, jnp.sin(angles) * factor)


def yarn_scale(parameters: Mapping[str, Any], name: str, default: float = 1) -> float:
    """Yarn's factor of queries and keys, times the parameter of that name."""
    return 0.1 * parameters.get(name, default) * math.log(float(parameters["factor"])) + 1


def _llama3(plain: jax.Array, parameters: Mapping[str, Any], factor: float) -> jax.Array:
    """Long waves are stretched, short ones stay, and those between are mixed."""
    low, high = float(parameters["low_freq_factor"]), float(parameters["high_freq_factor"])
    turns = parameters["original_max_position_embeddings"] * plain / (2 * math.pi)
    kept = jnp.clip((turns - low) / (high - low), 0, 1)
    return kept * plain + (1 - kept) * plain / factor


def _yarn(plain: jax.Array, parameters: Mapping[str, Any], factor: float, base: float, size: int) -> jax.Array:
    """Elements that turn often in the original context stay; those that turn seldom are stretched."""
    context = parameters["original_max_position_embeddings"]

    def element(turns: float) -> float:
        return size * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = element(float(parameters.get("beta_fast", 32))), element(float(parameters.get("beta_slow", 1)))
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    stretched = jnp.clip((jnp.arange(size // 2) - low) / max(high - low, 0.001), 0, 1)
    return plain / factor * stretched + plain * (1 - stretched)
