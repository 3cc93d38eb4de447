"""Names of a config's fields that vLLM's and transformers' code reads, from running it and from its source.

Two views, because each misses what the other has: `ReadFields` sees every read of a config object while a model is
built, also by a name that is computed, and nothing on branches that are not taken; `names_in_source` has what the
model's own files could read besides.
"""

from __future__ import annotations

import ast
import collections
import functools
import importlib
import pathlib
import sys
from collections.abc import Iterable, Iterator
from typing import Any

MODEL_FILES = ("/vllm/model_executor/models/", "/vllm/models/", "/vllm/model_executor/layers/mamba/")
CONFIG_FILES = ("/vllm/transformers_utils/configs/", "/transformers/models/")

HOLDERS = frozenset(["config", "hf_config", "text_config", "hf_text_config", "llm_config", "cfg", "kwargs", "self"])
"""Last parts of the expressions that a field is read from: `self.config.X`, `kwargs.pop("X")`."""


class ReadFields:
    """Records which attributes of config objects are read, for as long as it is entered.

    Attributes:
      names: those that were read, by the class of the config object.
      files: of models' own classes and config classes that read any.
    """

    def __init__(self) -> None:
        self.names: dict[type, set[str]] = collections.defaultdict(set)
        self.files: set[pathlib.Path] = set()
        self.base: Any = importlib.import_module("transformers").PretrainedConfig

    def __enter__(self) -> ReadFields:
        self.before, self.seen = self.base.__getattribute__, set[Any]()

        def read(config: Any, name: str) -> Any:
            if not name.startswith("_"):
                file = sys._getframe(1).f_code.co_filename
                if "/vllm/" in file or is_model_file(file):
                    self.names[type(config)].add(name)
                if is_model_file(file):
                    self.seen.update((file, type(config)))
            return self.before(config, name)

        self.base.__getattribute__ = read
        return self

    def __exit__(self, *raised: object) -> None:
        self.base.__getattribute__ = self.before
        for each in self.seen:
            modules = [sys.modules.get(base.__module__) for base in each.__mro__] if isinstance(each, type) else []
            files = [str(getattr(module, "__file__", "")) for module in modules] or [str(each)]
            self.files |= {pathlib.Path(file) for file in files if is_model_file(file)}


def is_model_file(file: str) -> bool:
    """True for files of single models' classes and config classes."""
    return any(part in file for part in MODEL_FILES) or (
        any(part in file for part in CONFIG_FILES) and "auto" not in file and "modeling" not in file
    )


def names_in_source(files: Iterable[pathlib.Path]) -> frozenset[str]:
    """Names that any of some files reads from a config, or that a config class in them declares."""
    return frozenset[str]().union(*map(_names_of, files))


@functools.cache
def _names_of(path: pathlib.Path) -> frozenset[str]:
    found: set[str] = set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    declares = any(part in str(path) for part in CONFIG_FILES)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (last := _last(node.value)) in HOLDERS:
            found |= {node.attr} if last != "self" or declares else set()
        elif isinstance(node, ast.Call) and node.args:
            called, first = node.func, node.args[0]
            if isinstance(called, ast.Name) and called.id in ("getattr", "hasattr") and _last(first) in HOLDERS:
                found |= set(_texts(node.args[1]))
            elif isinstance(called, ast.Attribute) and called.attr in ("get", "pop") and _last(called.value) in HOLDERS:
                found |= set(_texts(first))
        elif isinstance(node, ast.ClassDef) and declares:
            found |= set(_declared(node))
    return frozenset(name for name in found if name.isidentifier() and not name.startswith("_"))


def _last(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _texts(node: ast.AST) -> Iterator[str]:
    for each in ast.walk(node):
        if isinstance(each, ast.Constant) and isinstance(each.value, str):
            yield each.value


def _declared(node: ast.ClassDef) -> Iterator[str]:
    """Fields of a config class: annotated ones, parameters of its constructor, and other names of them."""
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            yield each.target.id
        elif isinstance(each, ast.Assign) and any(getattr(one, "id", "") == "attribute_map" for one in each.targets):
            yield from _texts(each.value)
        elif isinstance(each, ast.FunctionDef) and each.name in ("__init__", "__post_init__"):
            yield from (argument.arg for argument in (*each.args.args, *each.args.kwonlyargs))
