"""A model's `config.json` by its path or its name: a file, a folder, a Hugging Face cache on disk, a released model."""

from __future__ import annotations

import functools
import json
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, Concatenate, ParamSpec, TypeVar

from hkv.errors import ConfigError, FileError, SpecError
from hkv.model import released

Given = ParamSpec("Given")
Read = TypeVar("Read")

QUANTIZATION_FILE = "hf_quant_config.json"
"""File next to a config in which ModelOpt keeps what else stands in `quantization_config` (vLLM 0.33 `get_config`)."""


class ConfigFile(dict[str, Any]):
    """A config, and the file that it is from, which errors about its fields name; None for a released model's.

    The note is a line for the plan. A released model's config may be an excerpt, or single values: not `whole`. Marks
    of quantized weights in its name that do not say their bytes are `unweighed`.
    """

    def __init__(
        self,
        fields: Mapping[str, Any],
        path: pathlib.Path | None = None,
        note: str = "",
        whole: bool = True,
        unweighed: str = "",
    ) -> None:
        super().__init__(fields)
        self.path = path
        self.note = note
        self.whole = whole
        self.unweighed = unweighed


def naming_file(
    read: Callable[Concatenate[Mapping[str, Any], Given], Read],
) -> Callable[Concatenate[Mapping[str, Any], Given], Read]:
    """The same function of a config, with the config's file before the field in its errors."""

    @functools.wraps(read)
    def named(config: Mapping[str, Any], *args: Given.args, **options: Given.kwargs) -> Read:
        try:
            return read(config, *args, **options)
        except (ConfigError, SpecError) as error:
            where = f"{config.path}: " if isinstance(config, ConfigFile) and config.path is not None else ""
            if error.argument.startswith(where):
                raise
            raise type(error)(f"{where}{error.argument}", error.value, error.expected) from None

    return named


def load_config(path: str | pathlib.Path) -> dict[str, Any]:
    """The config of a file, of the `config.json` in a folder, or of a model by its name.

    Args:
      path: the file or the folder; if neither exists, the name of a model: the repository's in a Hugging Face cache
        on this machine (`HF_HUB_CACHE`, `HF_HOME`), else a released model that HKV ships the config of, or a variant of
        one. Nothing is fetched.

    Raises:
      FileError: it cannot be read, or is not a JSON object; or there is neither a file nor a model of that name.
    """
    path = pathlib.Path(path)
    if path.exists():
        return _in_folder(path) if path.is_dir() else ConfigFile(_object(path), path)
    name = path.as_posix()
    cached = hub_cache() / f"models--{name.replace('/', '--')}"
    if cached.is_dir():
        return _in_folder(cached)
    found = released.resolve(name)
    if found is None:
        raise FileError(name, None, "", "no such file, and no released model of that name", released.expected(name))
    whole = found.model.form == "copy"
    return ConfigFile(found.config, note=found.note, whole=whole, unweighed=found.unweighed)


def hub_cache() -> pathlib.Path:
    """The folder in which Hugging Face's libraries keep what they fetched (`huggingface_hub.constants`)."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(variable):
            return pathlib.Path(os.environ[variable]).expanduser()
    home = os.environ.get("HF_HOME")
    if not home:
        home = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache"), "huggingface")
    return pathlib.Path(home).expanduser() / "hub"


def _in_folder(folder: pathlib.Path) -> ConfigFile:
    """The config in a folder, which may be a repository's in such a cache."""
    note = ""
    if (folder / "snapshots").is_dir() and not (folder / "config.json").exists():
        folder = _snapshot(folder)
        note = f"config of snapshot {folder.name[:12]} in the Hugging Face cache"
    config = ConfigFile(_object(folder / "config.json"), folder / "config.json", note)
    beside = folder / QUANTIZATION_FILE
    if config.get("quantization_config") is None and beside.is_file():
        config["quantization_config"] = _object(beside)
    return config


def _snapshot(repository: pathlib.Path) -> pathlib.Path:
    """The snapshot of the main revision, else the only one."""
    main = repository / "refs" / "main"
    snapshots = {path.parent.name: path.parent for path in repository.glob("snapshots/*/config.json")}
    if main.is_file() and (revision := main.read_text(encoding="utf-8").strip()) in snapshots:
        return snapshots[revision]
    if len(snapshots) == 1:
        return next(iter(snapshots.values()))
    found = ", ".join(sorted(snapshots)) or "no snapshot with a config.json"
    raise FileError(str(repository), None, "snapshots", found, "one with a config.json, or refs/main that names it")


def _object(path: pathlib.Path) -> dict[str, Any]:
    """A file's JSON object."""
    try:
        text = path.read_text(encoding="utf-8")
        if text.startswith("\ufeff"):
            expected = "JSON without a byte-order mark, which Hugging Face's libraries do not read"
            raise FileError(str(path), 1, "", "a byte-order mark", expected)
        config = json.loads(text, object_pairs_hook=lambda pairs: _without_duplicates(path, pairs))
    except OSError as error:
        raise FileError(str(path), None, "", error.strerror, "a readable config.json") from None
    except FileError:
        raise
    except (ValueError, RecursionError) as error:
        problem = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise FileError(str(path), getattr(error, "lineno", None), "", problem, "JSON") from None
    if not isinstance(config, dict):
        raise FileError(str(path), None, "", type(config).__name__, "a JSON object")
    return config


def _without_duplicates(path: pathlib.Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of fields, each named once: of two values libraries take the last, and people may mean the first."""
    found = dict(pairs)
    if len(found) < len(pairs):
        for name, value in pairs:
            if found[name] != value:
                raise FileError(str(path), None, name, [value, found[name]], "a field that stands there once")
    return found
