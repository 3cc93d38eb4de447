"""A served model's cache and pool in a file, and back."""

from __future__ import annotations

import dataclasses
import json
import os

import jax
import jax.numpy as jnp

from hkv.cache import checkpoint
from hkv.cache.state import StepState
from hkv.dialects.vllm.config import VllmConfig
from hkv.errors import OperationError
from hkv.serving.serving import Serving

POOL = "pool"


def save(path: str | os.PathLike[str], config: VllmConfig, serving: Serving) -> None:
    """Writes the cache and its pool, whole or not at all: `hkv.cache.checkpoint.save`."""
    notes = {"layers": _described(serving)}
    checkpoint.save(path, config, serving.cache.state, {POOL: serving.pool}, {POOL: serving.layers[0].layout}, notes)


def restore(path: str | os.PathLike[str], config: VllmConfig, like: Serving) -> Serving:
    """The cache and the pool of a file, bit for bit.

    Args:
      path: the file.
      config: the configuration that it was saved under.
      like: an empty `Serving` of the same sizes.

    Raises:
      OperationError: a file of other layers, or of a cache of another kind.
      FileError, ConfigError, LayoutError: as `hkv.cache.checkpoint.restore`.
    """
    found = checkpoint.restore(path, config, {POOL: like.layers[0].layout})
    if not isinstance(found.state, StepState):
        raise OperationError("path", str(path), "the state of a cache for whole steps")
    if found.notes.get("layers") != _described(like):
        raise OperationError("path", str(path), "a file of the same layers in the same places")
    state = jax.tree.map(jnp.asarray, found.state)
    return dataclasses.replace(
        like, cache=dataclasses.replace(like.cache, state=state), pool=jnp.asarray(found.pools[POOL])
    )


def _described(serving: Serving) -> str:
    return json.dumps([[layer.name, layer.group, layer.index, repr(layer.layout)] for layer in serving.layers])
