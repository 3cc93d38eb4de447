"""Files of the wheel `hkv-layouts`: the modules below, all that they import as they are imported, and their data."""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parents[2]

MODULES = ("hkv.connectors", "hkv.spec", "hkv.model", "hkv.layout", "hkv.chunks.plans", "hkv.chunks.detection")
"""Modules and packages, whole, that the wheel is for; what their modules import comes with them."""

LEFT_OUT = ("hkv.layout.views.jax", "hkv.layout.views.runs")
"""Modules of these that need JAX."""

LOADED_BY_NAME = ("hkv.dialects.vllm.kinds", "hkv.views")
"""Packages that import their modules by name."""

DATA = (".json", ".toml", ".h", ".typed")


def chosen_files() -> list[str]:
    """Paths below the root of the repository."""
    left = [module for name in (*MODULES, *LOADED_BY_NAME) for module in _modules(name)]
    found: set[str] = set()
    while left:
        name = left.pop()
        path = _path(name)
        if path is None or name in LEFT_OUT or (relative := path.relative_to(ROOT).as_posix()) in found:
            continue
        found.add(relative)
        found |= {each.relative_to(ROOT).as_posix() for each in _data(path)}
        left += [name.rpartition(".")[0], *_imported(ast.parse(path.read_text(encoding="utf-8")).body)]
    return sorted(found)


def _path(name: str) -> pathlib.Path | None:
    place = ROOT.joinpath(*name.split(".")) if name else None
    if place is None:
        return None
    return next((path for path in (place.with_suffix(".py"), place / "__init__.py") if path.is_file()), None)


def _modules(name: str) -> Iterator[str]:
    yield name
    for path in sorted(ROOT.joinpath(*name.split(".")).rglob("*.py")):
        yield ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def _data(path: pathlib.Path) -> list[pathlib.Path]:
    """Data beside and below a package's `__init__.py`, up to the packages below it."""
    if path.name != "__init__.py":
        return []
    return [each for each in path.parent.rglob("*") if each.suffix in DATA and _package(each) == path.parent]


def _package(path: pathlib.Path) -> pathlib.Path:
    return next(folder for folder in path.parents if (folder / "__init__.py").is_file())


def _imported(body: list[ast.stmt]) -> Iterator[str]:
    """Names that are imported with a module; those in functions and for type checkers are not."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (node.module, *(f"{node.module}.{each.name}" for each in node.names))
