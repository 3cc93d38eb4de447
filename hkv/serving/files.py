"""A served model's cache and pool in a file of safetensors, or in a folder of orbax, and back."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp

from hkv.cache import checkpoint
from hkv.cache.state import StepState
from hkv.dialects.vllm.config import VllmConfig
from hkv.errors import FileError, MissingExtraError, OperationError
from hkv.serving.serving import Serving

POOL, SERVED, DESCRIPTION = "pool", "served", "description"


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
      OperationError: a file of other layers, or of a cache of another kind; `like` in debug mode.
      FileError, ConfigError, LayoutError: as `hkv.cache.checkpoint.restore`.
    """
    if like.marks is not None:
        raise OperationError("like", "a cache in debug mode", "debug=False: a file does not say what was written")
    found = checkpoint.restore(path, config, {POOL: like.layers[0].layout})
    if not isinstance(found.state, StepState):
        raise OperationError("path", str(path), "the state of a cache for whole steps")
    _require_layers(path, found.notes.get("layers"), like)
    state = jax.tree.map(jnp.asarray, found.state)
    return dataclasses.replace(
        like, cache=dataclasses.replace(like.cache, state=state), pool=jnp.asarray(found.pools[POOL])
    )


def save_orbax(path: str | os.PathLike[str], config: VllmConfig, serving: Serving) -> None:
    """Writes the cache and its pool to a new folder with orbax: sharded arrays too, each process its own parts.

    Raises:
      FileError: the folder exists already.
      MissingExtraError: orbax-checkpoint is not installed.
    """
    library, folder = _orbax(), pathlib.Path(path).absolute()
    if folder.exists():
        raise FileError(str(path), None, "", "a folder or file that exists", "a new folder")
    layouts = {POOL: checkpoint.describe(serving.layers[0].layout)}
    told = {"config": checkpoint.describe(config), "layouts": layouts, "layers": _described(serving)}
    with library.Checkpointer(library.CompositeCheckpointHandler()) as checkpointer:
        items = {SERVED: library.args.StandardSave(serving), DESCRIPTION: library.args.JsonSave(told)}
        checkpointer.save(folder, args=library.args.Composite(**items))


def restore_orbax(path: str | os.PathLike[str], config: VllmConfig, like: Serving) -> Serving:
    """The cache and the pool of a folder of orbax's, bit for bit.

    Args:
      path: the folder.
      config: the configuration that it was saved under.
      like: an empty `Serving` of the same sizes; its arrays say where those that are read have to be.

    Raises:
      FileError: no such folder, or none that `save_orbax` wrote.
      OperationError: a folder of other layers.
      ConfigError, LayoutError: as `hkv.cache.checkpoint.restore`.
      MissingExtraError: orbax-checkpoint is not installed.
    """
    library, folder = _orbax(), pathlib.Path(path).absolute()
    if not (folder / SERVED).is_dir() or not (folder / DESCRIPTION).is_dir():
        raise FileError(str(path), None, "", "no checkpoint of a served cache", "a folder that save_orbax wrote")
    with library.Checkpointer(library.CompositeCheckpointHandler()) as checkpointer:
        found = checkpointer.restore(folder, args=library.args.Composite(**{DESCRIPTION: library.args.JsonRestore()}))
        told = found[DESCRIPTION]
        checkpoint.require_same(told["config"], told["layouts"], config, {POOL: like.layers[0].layout})
        _require_layers(path, told["layers"], like)
        asked = {SERVED: library.args.StandardRestore(like)}
        return checkpointer.restore(folder, args=library.args.Composite(**asked))[SERVED]


def _require_layers(path: str | os.PathLike[str], saved: str | None, like: Serving) -> None:
    if saved != _described(like):
        raise OperationError("path", str(path), "a file of the same layers in the same places")


def _orbax() -> Any:
    try:
        import orbax.checkpoint
    except ImportError as error:
        raise MissingExtraError("orbax", "orbax", "to save and restore a cache with it") from error
    return orbax.checkpoint


def _described(serving: Serving) -> str:
    return json.dumps([[layer.name, layer.group, layer.index, repr(layer.layout)] for layer in serving.layers])
