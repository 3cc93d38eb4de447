"""Save and restore a running cache, its state and its pages, in one safetensors file.

A file holds the bytes of every array as they are, NaN payloads included, and a description of the configuration and of
every pool's layout. It is restored only into the same: where anything differs, the error names it. A file is written
whole or not at all.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import os
from collections.abc import Mapping
from fractions import Fraction
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
import numpy as np

from hkv.cache.state import StepState
from hkv.dialects.vllm.config import VllmConfig
from hkv.errors import ConfigError, FileError, LayoutError, MissingExtraError, OperationError
from hkv.files import OutputFile
from hkv.layout.block_layout import Layout
from hkv.state.state import State

FORMAT = "hkv-checkpoint-2"

STATES: Mapping[str, type] = MappingProxyType({"State": State, "StepState": StepState})
"""Kinds of state that can be saved."""

_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A restored cache and what was saved with it.

    Attributes:
      state: the saved state, its arrays NumPy arrays of the same shapes.
      pools: page pools by name, NumPy arrays of the same dtypes and shapes.
      notes: strings that the caller saved with them.
    """

    state: State | StepState
    pools: Mapping[str, np.ndarray]
    notes: Mapping[str, str]


def save(
    path: str | os.PathLike[str],
    config: VllmConfig,
    state: State | StepState,
    pools: Mapping[str, Any] = _NOTHING,
    layouts: Mapping[str, Layout] = _NOTHING,
    notes: Mapping[str, str] = _NOTHING,
) -> None:
    """Writes a running cache. Waits for the device; the arrays stay as they are, and are not donated.

    Args:
      path: the file, replaced if it is there; its folder exists.
      config: the cache's configuration.
      state: a `State` or a `StepState`, not batched.
      pools: page pools by name, arrays of any dtype.
      layouts: of each pool, by the same names.
      notes: strings that a host needs to go on, e.g. the prefix keys that it numbered.

    Raises:
      OperationError: another kind of state, or names of pools and layouts that differ.
      FileError: it cannot be written there.
      MissingExtraError: safetensors is not installed.
    """
    library = _library()
    if type(state).__name__ not in STATES:
        raise OperationError("state", type(state).__name__, f"one of {', '.join(STATES)}")
    _check_names(pools, layouts)
    arrays = {f"state.{name}": np.asarray(value) for name, value in vars(state).items()}
    arrays |= {f"pool.{name}": np.asarray(value) for name, value in pools.items()}
    raw = {name: np.ascontiguousarray(array).reshape(-1).view(np.uint8) for name, array in arrays.items()}
    header = {
        "format": FORMAT,
        "state": type(state).__name__,
        "config": _text(describe(config)),
        "layouts": _text({name: describe(layout) for name, layout in layouts.items()}),
        "arrays": _text({name: [array.dtype.name, list(array.shape)] for name, array in arrays.items()}),
        "notes": _text(dict(notes)),
    }
    header["sha256"] = _checksum(raw, header)
    with OutputFile(path) as output:
        if output.staging is None or output.target is None:
            raise FileError(str(path), None, "", "a device or a pipe", "a path for a file, which can be read back")
        try:
            library.numpy.save_file(raw, output.staging, metadata=header)
            _sync(output.staging)
        except (OSError, library.SafetensorError) as error:
            raise FileError(str(path), None, "", _reason(error), "a path that can be written") from error
    _sync(output.target.parent)


def restore(path: str | os.PathLike[str], config: VllmConfig, layouts: Mapping[str, Layout] = _NOTHING) -> Checkpoint:
    """Reads a cache back.

    Args:
      path: the file.
      config: the configuration that is to go on, which must be the saved one.
      layouts: of each pool, which must be the saved ones, by the same names.

    Raises:
      FileError: the file is not there, is no checkpoint, or is damaged.
      ConfigError: the configuration differs; names the first field that does.
      LayoutError: a layout differs; names it.
      MissingExtraError: safetensors is not installed.
    """
    header, raw = _read(path)
    require_same(json.loads(header["config"]), json.loads(header["layouts"]), config, layouts)
    arrays: dict[str, np.ndarray] = {}
    for name, (dtype, shape) in json.loads(header["arrays"]).items():
        arrays[name] = raw[name].view(jnp.dtype(dtype)).reshape(shape)
    state = {name.removeprefix("state."): array for name, array in arrays.items() if name.startswith("state.")}
    pools = {name.removeprefix("pool."): array for name, array in arrays.items() if name.startswith("pool.")}
    return Checkpoint(STATES[header["state"]](**state), pools, json.loads(header["notes"]))


def require_same(saved: Any, saved_layouts: Any, config: VllmConfig, layouts: Mapping[str, Layout]) -> None:
    """Raises unless a configuration and layouts are those that were saved, as JSON has what `describe` gave.

    Raises:
      ConfigError: the configuration differs; names the first field that does.
      LayoutError: a layout differs; names it.
    """
    _compare(saved, _plain(describe(config)), "config", ConfigError)
    wanted = {name: _plain(describe(one)) for name, one in layouts.items()}
    _compare(saved_layouts, wanted, "layouts", LayoutError)


def fingerprint(value: VllmConfig | Layout) -> str:
    """SHA-256 of a configuration or a layout, in hexadecimal digits: equal exactly where `describe` is."""
    return hashlib.sha256(_text(describe(value)).encode()).hexdigest()


def describe(value: Any) -> Any:
    """A description in JSON's terms: fields by name, classes named, sets sorted."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: describe(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"class": type(value).__name__, **fields}
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, Mapping):
        return {str(key): describe(one) for key, one in value.items()}
    if isinstance(value, frozenset | set):
        return sorted(describe(one) for one in value)
    if isinstance(value, tuple | list):
        return [describe(one) for one in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Fraction):
        return str(value)
    raise OperationError("value", type(value).__name__, "numbers, strings, and dataclasses and collections of them")


def _read(path: str | os.PathLike[str]) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    library = _library()
    try:
        with library.safe_open(path, framework="np") as file:
            header = dict(file.metadata() or {})
            raw = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, library.SafetensorError) as error:
        raise FileError(str(path), None, "", _reason(error), "a checkpoint that can be read") from error
    if header.get("format") != FORMAT:
        raise FileError(str(path), None, "format", header.get("format"), FORMAT)
    found = header.pop("sha256", None)
    if found != _checksum(raw, header):
        raise FileError(str(path), None, "sha256", found, "that of the content: the file is damaged")
    return header, raw


def _check_names(pools: Mapping[str, Any], layouts: Mapping[str, Layout]) -> None:
    if set(pools) != set(layouts):
        raise OperationError("layouts", sorted(layouts), f"a layout for each of the pools {sorted(pools)}")


def _compare(saved: Any, wanted: Any, where: str, error: type[ConfigError] | type[LayoutError]) -> None:
    """Raises for the first place in which two descriptions differ."""
    if isinstance(saved, dict) and isinstance(wanted, dict):
        for name in [*saved, *(name for name in wanted if name not in saved)]:
            if name not in saved or name not in wanted:
                expected = f"{sorted(saved)}, as in the checkpoint"
                raise error(where, sorted(wanted), expected)
            _compare(saved[name], wanted[name], f"{where}.{name}", error)
    elif isinstance(saved, list) and isinstance(wanted, list) and len(saved) == len(wanted):
        for index, pair in enumerate(zip(saved, wanted, strict=True)):
            _compare(*pair, f"{where}[{index}]", error)
    elif saved != wanted:
        raise error(where, wanted, f"{saved!r}, as in the checkpoint")


def _checksum(raw: Mapping[str, np.ndarray], header: Mapping[str, str]) -> str:
    digest = hashlib.sha256(_text(dict(sorted(header.items()))).encode())
    for name in sorted(raw):
        digest.update(name.encode())
        digest.update(raw[name].data)
    return digest.hexdigest()


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _plain(value: Any) -> Any:
    return json.loads(_text(value))


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or " ".join(str(error).split())


def _sync(path: str | os.PathLike[str]) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _library() -> Any:
    try:
        import safetensors
        import safetensors.numpy
    except ImportError as error:
        raise MissingExtraError("safetensors", "disk", "to save and restore a cache") from error
    return safetensors
