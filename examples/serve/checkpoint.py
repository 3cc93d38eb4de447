"""A Hugging Face checkpoint folder: `config.json`, and weights by their names."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from safetensors.numpy import load_file


class Weights(Mapping[str, jax.Array]):
    """Weights by the ends of their names: `weights["mlp.up_proj.weight"]` below a prefix.

    Args:
      arrays: all weights of the checkpoint by their whole names.
      prefix: what all names of this view begin with.
    """

    def __init__(self, arrays: Mapping[str, jax.Array], prefix: str = "") -> None:
        self._arrays, self._prefix = arrays, prefix

    def __getitem__(self, name: str) -> jax.Array:
        return self._arrays[self._prefix + name]

    def __iter__(self) -> Iterator[str]:
        return (name.removeprefix(self._prefix) for name in self._arrays if name.startswith(self._prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def below(self, prefix: str) -> Weights:
        """The weights whose names go on with a prefix."""
        return Weights(self._arrays, self._prefix + prefix)


def read_config(folder: pathlib.Path) -> dict[str, Any]:
    """The checkpoint's `config.json`."""
    return json.loads((folder / "config.json").read_text())


def read_weights(folder: pathlib.Path) -> dict[str, jax.Array]:
    """The weights of all its safetensors files, as float32, by name."""
    found: dict[str, jax.Array] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= {name: jnp.asarray(array, jnp.float32) for name, array in load_file(path).items()}
    if not found:
        raise FileNotFoundError(f"{folder}: no *.safetensors file")
    return found
