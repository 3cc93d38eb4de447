"""Nothing but a kind's own files says what the kind is: no check of its class, no comparison with its name."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from hkv.dialects.rtp_llm.planning import sizes
from hkv.dialects.vllm import kinds
from hkv.dialects.vllm.kinds import layer_class
from hkv.spec import CLASSES, KINDS
from hkv.spec.attention import AttentionSpec
from hkv.spec.layer import LayerSpec

ROOT = Path(__file__).parents[2]

OWN = ("hkv/spec/", "hkv/dialects/vllm/kinds/", "reference/dialects/vllm/kinds/")
"""Folders of the kinds. Kinds of a dialect that are not a layer's (RTP-LLM's group types) are not among them."""

PLANTED = ("hkv/testing/mutants/", "hkv/testing/suites/")
"""Planted defects and suites: data of tests."""

MAKERS = {
    "hkv/model/huggingface/decoder.py": "config.json, whose layer types have names of their own",
    "hkv/model/huggingface/families/heads.py": "config.json",
    "hkv/model/huggingface/families/latent.py": "config.json",
    "hkv/dialects/rtp_llm/planning/sizes.py": "RTP-LLM's blocks, which have kinds of their own",
    "hkv/dialects/rtp_llm/log.py": "group types of RTP-LLM's logs",
    "hkv/oracle/vectors/cases.py": "layers of published vectors",
    "hkv/connectors/cases.py": "layers of the memory that connectors are asked for",
    "hkv/testing/kernels/placement.py": "layers of the memory that kernels are asked for",
}
"""Files that make layers of concrete kinds, and from what."""

OTHER_NAMES = {
    "hkv/model/huggingface/": "layer types of config.json",
    "hkv/dialects/vllm/weights/": "the same",
    "hkv/dialects/rtp_llm/": "kinds of RTP-LLM's blocks",
    "reference/dialects/rtp_llm/": "the same",
}
"""Places where a word that is also a kind's name means something else."""


Nodes = Sequence[ast.AST]
"""All nodes of a file, or of a piece of code."""


@pytest.fixture(scope="module")
def files() -> dict[str, Nodes]:
    """Every file outside the kinds' own folders."""
    paths = [path for root in ("hkv", "reference") for path in sorted((ROOT / root).rglob("*.py"))]
    names = {path.relative_to(ROOT).as_posix(): path for path in paths}
    outside = {name: path for name, path in names.items() if not name.startswith((*OWN, *PLANTED))}
    assert len(outside) > 300
    return {name: _nodes(path.read_text()) for name, path in outside.items()}


def _nodes(text: str) -> Nodes:
    return list(ast.walk(ast.parse(text)))


def _named(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for child in nodes:
        if isinstance(child, ast.Name | ast.Attribute):
            yield child.id if isinstance(child, ast.Name) else child.attr


def _described(cls: type[LayerSpec] = LayerSpec) -> Iterator[type[LayerSpec]]:
    for each in cls.__subclasses__():
        yield each
        yield from _described(each)


HOMES = {cls.__name__: cls.__module__.replace(".", "/") + ".py" for cls in _described() if "hkv" in cls.__module__}
"""Every class of layer, what kinds share and dialects' own among them, and its file, the one that may check for it."""


def _class_checks(nodes: Nodes, path: str = "", homes: Mapping[str, str] = HOMES) -> Iterator[int]:
    for node in nodes:
        checked: list[ast.AST] = []
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("isinstance", "issubclass")
        ):
            checked = list(node.args[1:])
        elif isinstance(node, ast.MatchClass):
            checked = [node.cls]
        elif isinstance(node, ast.Compare):
            checked = [node.left, *node.comparators]
        if any(homes.get(name, path) != path for part in checked for name in _named(ast.walk(part))):
            yield getattr(node, "lineno", 0)


def _name_checks(nodes: Nodes) -> Iterator[int]:
    for node in nodes:
        parts: list[ast.AST] = []
        if isinstance(node, ast.Compare):
            parts = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            parts = [node.value]
        found = (child for part in parts for child in ast.walk(part) if isinstance(child, ast.Constant))
        if any(child.value in KINDS for child in found if isinstance(child.value, str)):
            yield getattr(node, "lineno", 0)


def test_no_class_of_a_kind_is_checked_elsewhere(files):
    assert not issubclass(AttentionSpec, tuple(KINDS.values())), "geometry that kinds share is no kind"
    assert AttentionSpec.__name__ not in CLASSES
    assert {"AttentionSpec", sizes.OpaqueRegion.__name__, *CLASSES} <= HOMES.keys()
    found = [f"{name}:{line}" for name, nodes in files.items() for line in _class_checks(nodes, name)]
    assert found == []


def test_no_class_of_a_reference_kind_is_checked_elsewhere(files):
    rules = sorted(ROOT.glob("reference/dialects/*/kinds/*.py"))
    parsed = [(path, node) for path in rules for node in _nodes(path.read_text())]
    concrete = [(path, node) for path, node in parsed if isinstance(node, ast.ClassDef) and node.bases]
    classes = {node.name: str(path.relative_to(ROOT)) for path, node in concrete}
    assert {"MambaRow", "MambaKind"} <= classes.keys()
    found = [f"{name}:{line}" for name, nodes in files.items() for line in _class_checks(nodes, name, classes)]
    assert found == []


def test_no_name_of_a_kind_is_compared_elsewhere(files):
    others = {name: nodes for name, nodes in files.items() if not name.startswith(tuple(OTHER_NAMES))}
    found = [f"{name}:{line}" for name, nodes in others.items() for line in _name_checks(nodes)]
    assert found == [f"hkv/dialects/vllm/planning/grouping.py:{line}" for line in _sole_field(files)]


def _sole_field(files: dict[str, Nodes]) -> Iterator[int]:
    """Lines in which `sliding_window` is the name of a field that cannot be merged, not of the kind."""
    for node in files["hkv/dialects/vllm/planning/grouping.py"]:
        if isinstance(node, ast.Compare) and ast.unparse(node.left) == "error.argument":
            yield getattr(node, "lineno", 0)


def test_only_what_makes_layers_names_their_classes(files):
    found = {name for name, nodes in files.items() if set(_named(nodes)) & CLASSES.keys()}
    assert found == set(MAKERS)


def test_kinds_have_no_numbers_to_compare(files):
    assert not [name for name, module in kinds.all_kinds().items() if hasattr(module, "NUMBER")]
    for name, nodes in files.items():
        assert "KIND" not in set(_named(nodes)), name


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_kind_says_everything(kind):
    cls = KINDS[kind]
    assert cls.written.short_name
    assert cls.readable is not LayerSpec.readable
    assert set(layer_class(cls).vllm_fields.values()) <= set(dir(cls)) | set(cls.__dataclass_fields__)
    assert (layer_class(cls).vllm_name is None) <= (not layer_class(cls).vllm_fields)


@pytest.mark.parametrize(
    "text",
    [
        *("isinstance(spec, Mamba)", "isinstance(spec, LayerSpec | hkv.spec.Mamba)", "type(s) is Mamba"),
        *("isinstance(spec, AttentionSpec)", "assert isinstance(block.spec, OpaqueRegion)"),
    ],
)
def test_a_check_of_a_class_is_found(text):
    assert list(_class_checks(_nodes(text))) == [1]


@pytest.mark.parametrize("text", ["spec.kind == 'mamba'", "kind in ('mla', 'x')", "group['kind'] != 'opaque'"])
def test_a_comparison_with_a_name_is_found(text):
    assert list(_name_checks(_nodes(text))) == [1]
