"""Parts that the families share: norms, rotary positions, linear maps. All in float32."""

from __future__ import annotations

import math
from collections.abc import Mapping
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


class Rotary(NamedTuple):
    """Rotary positions: an angle a token for each pair of elements, and a factor of sine and cosine."""

    frequencies: jax.Array
    factor: float

    def turn(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        """Heads `[tokens, heads, elements]`, whose first half turns against the second."""
        angles = positions[:, None].astype(jnp.float32) * self.frequencies
        cos, sin = (f(angles)[:, None] * self.factor for f in (jnp.cos, jnp.sin))
        first, second = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def rotary(parameters: Mapping[str, Any], size: int) -> Rotary:
    """The rotary positions of a config's `rope_parameters`.

    Raises:
      ValueError: a `rope_type` that is not known here.
    """
    base, kind = float(parameters["rope_theta"]), parameters.get("rope_type", "default")
    plain = base ** (-jnp.arange(0, size, 2, dtype=jnp.float32) / size)
    if kind == "default":
        return Rotary(plain, 1.0)
    factor = float(parameters["factor"])
    if kind == "linear":
        return Rotary(plain / factor, 1.0)
    if kind == "llama3":
        return Rotary(_llama3(plain, parameters, factor), 1.0)
    if kind == "yarn":
        return Rotary(_yarn(plain, parameters, factor, base, size), 0.1 * math.log(factor) + 1)
    raise ValueError(f"rope_type = {kind!r}: expected default, linear, llama3 or yarn")


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
