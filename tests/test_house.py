"""Counts of the house: names of dialects outside their folders, modules and rules that nothing uses."""

from __future__ import annotations

import ast
import dataclasses
import functools
import pathlib
import re
from collections.abc import Iterator

import pytest

import hkv
from benchmarks import house
from hkv.contract.dialect import Dialect
from reference.dialects.rules import Rules

ROOT = pathlib.Path(hkv.__file__).parent
HOUSE = pathlib.Path(__file__).parents[1]
NAMES = re.compile(r"vllm|rtp", re.IGNORECASE)

ROOMS = ("oracle", "replay", "testing", "cli")
"""Folders that know the contract only."""

WRITTEN = ("hkv", "reference", "pallas_kernels", "tests", "examples", "benchmarks", "docs")
"""Folders of the repository with Python in them."""

Nodes = tuple[ast.AST, ...]
"""All nodes of a file."""


@functools.cache
def nodes_of(path: pathlib.Path) -> Nodes:
    return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


@pytest.fixture(scope="module", autouse=True)
def forgotten() -> Iterator[None]:
    """Millions of nodes would slow down the tests that come after these in the process."""
    yield
    nodes_of.cache_clear()


def code_of(*folders: str) -> Iterator[tuple[str, Nodes]]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), nodes_of(path)


def strings(nodes: Nodes) -> Iterator[ast.Constant]:
    """String constants that are no docstrings."""
    told = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in told:
            yield node


def imported(nodes: Nodes) -> Iterator[tuple[int, str]]:
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            yield node.lineno, f"{node.module} {' '.join(name.name for name in node.names)}"
        elif isinstance(node, ast.Import):
            yield node.lineno, " ".join(name.name for name in node.names)


@pytest.mark.parametrize("room", ROOMS)
def test_no_dialect_is_named_outside_its_folder(room: str) -> None:
    named = []
    for path, nodes in code_of(room):
        found = [(node.lineno, str(node.value)) for node in strings(nodes)] + list(imported(nodes))
        named += [f"{path}:{line}: {text}" for line, text in found if NAMES.search(text)]
    assert not named


def test_names_are_found_where_they_are() -> None:
    """The count above is of something: the registry has some."""
    found = [
        node.value for path, nodes in code_of("contract") if path == "contract/registry.py" for node in strings(nodes)
    ]
    assert sum(bool(NAMES.search(str(value))) for value in found) > 4


def test_every_module_is_reached() -> None:
    modules = house.modules_of("hkv")
    assert house.islands(house.imports_of(modules), modules) == []


def test_imports_run_one_way() -> None:
    """No module reaches itself, and none imports one of a higher floor, be it in a function or for type checkers."""
    imports = house.imports_of(house.modules_of("hkv"))
    assert house.circles(imports) == []
    assert house.arrows_up(imports) == []


def test_an_island_is_found() -> None:
    modules: dict[str, pathlib.Path] = dict.fromkeys(("hkv.cli.a", "hkv.b", "hkv.c"), HOUSE / "hkv" / "limits.py")
    assert house.islands({"hkv.cli.a": {"hkv.b": 1}, "hkv.b": {}, "hkv.c": {"hkv.b": 1}}, modules) == ["hkv.c"]


def test_circles_and_arrows_are_found() -> None:
    imports = {"hkv.spec.a": {"hkv.oracle.b": 3}, "hkv.oracle.b": {"hkv.spec.a": 5}, "hkv.errors": {}}
    assert house.circles(imports) == [["hkv.oracle.b", "hkv.spec.a"]]
    assert house.arrows_up(imports) == ["hkv.spec.a:3 -> hkv.oracle.b"]


def calls(*folders: str) -> set[str]:
    """Names of attributes that code of these folders asks for."""
    return {node.attr for _, nodes in code_of(*folders) for node in nodes if isinstance(node, ast.Attribute)}


def test_everything_in_the_contract_is_asked_for() -> None:
    offered = {name for name in vars(Dialect) if not name.startswith("_")} | set(Dialect.__annotations__)
    asked = calls(*ROOMS)
    for path in sorted((ROOT / "contract").glob("*.py")):
        asked |= {node.attr for node in nodes_of(path) if isinstance(node, ast.Attribute)}
    assert not offered - asked


def test_every_rule_of_the_record_is_called() -> None:
    source = ast.parse((ROOT.parent / "reference/dialects/vllm/manager.py").read_text())
    asked = [ast.unparse(node.func) for node in ast.walk(source) if isinstance(node, ast.Call)]
    called = {name.removeprefix("self._rules.") for name in asked if name.startswith("self._rules.")}
    assert {field.name for field in dataclasses.fields(Rules)} == called


BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")
"""Fields of statements in which other statements stand."""


def statements(tree: ast.Module) -> Iterator[ast.AST]:
    """Statements of a module at any depth; none of their expressions, which are most of its nodes."""
    left: list[ast.AST] = [tree]
    while left:
        yield (node := left.pop())
        for block in BLOCKS:
            left += getattr(node, block, ())


def docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    """Docstrings of a module, its classes, functions and attributes."""
    for node in statements(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value


@pytest.mark.parametrize("folder", WRITTEN)
def test_docstrings_start_with_a_noun_phrase_or_a_verb(folder: str) -> None:
    found = 0
    for path in sorted((HOUSE / folder).rglob("*.py")):
        for node in docstrings(ast.parse(path.read_text(encoding="utf-8"))):
            found += 1
            text = str(node.value).strip()
            assert house.OPENING.match(text) is None, f"{path}:{node.lineno}: {text.splitlines()[0]}"
    assert found
