"""Writes docs/tables/models.md from the configs in tests/data/models: `python benchmarks/model_tables.py`.

Every number comes from the same code as `hkv plan`; the derivations by hand are in tests/data/model_totals.json, and a
test evaluates them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import pathlib

from benchmarks import judged_models
from hkv.model.huggingface import CacheLayer, Model, load_config, read_model
from hkv.spec import AttentionSpec, Mamba

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDER = ROOT / "tests" / "data" / "models"
TARGET = ROOT / "docs" / "tables" / "models.md"

HEAD = """# What public models cache

Each table lists a model's caches under vLLM 0.33, layers of one description together: their kind, key/value heads,
bytes of one token (of one snapshot for recurrent states), and the fields of `config.json` that decide them. The total
is derived by hand and checked by a test. Sizes are for one GPU, in the model's own element type.

Configs: `tests/data/models`, with the values that the `transformers` library gives each family by default, so a
released checkpoint may differ: `docs/tables/released-models.md` has those. Written by
`python benchmarks/model_tables.py`.
"""


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def models() -> dict[str, Model]:
    return {name: read_model(load_config(FOLDER / f"{name}.json")) for name in names()}


def document() -> str:
    derivations = json.loads((FOLDER.parent / "model_totals.json").read_text())
    tables = (section(name, model, derivations[name]) for name, model in models().items())
    return "\n".join([HEAD, judged_models.section(), *tables])


def section(name: str, model: Model, derivation: dict[str, str]) -> str:
    lines = [
        f"## {name}",
        "",
        "| layers | kind | heads | bytes | fields responsible |",
        "|---|---|---|---|---|",
    ]
    lines += [row(group) for group in alike(model)]
    lines += [
        "",
        f"By hand: {derivation['says']}.",
        "",
        f"- a token: `{derivation['per_token']}` = {show(model.token_bytes)} bytes",
        f"- a sequence: `{derivation['per_sequence']}` = {model.resident_bytes:,} bytes",
        f"- a token if every layer were full attention: {model.full_token_bytes:,} bytes",
        "",
    ]
    return "\n".join(lines)


def show(number: object) -> str:
    value = float(number)  # type: ignore[arg-type]
    return f"{value:,.0f}" if value == int(value) else f"{value:,.4f}"


def alike(model: Model) -> list[list[CacheLayer]]:
    """Layers of one description together, in order of first appearance."""
    groups: dict[object, list[CacheLayer]] = {}
    for layer in model.layers:
        part = layer.name.split(".", 2)[2:]
        groups.setdefault((layer.spec, layer.shares, tuple(part)), []).append(layer)
    return list(groups.values())


def row(layers: list[CacheLayer]) -> str:
    first = layers[0]
    part = ".".join(first.name.split(".")[2:])
    where = ranges([layer.index for layer in layers]) + (f" ({part})" if part else "")
    fields = "; ".join(f"{what}: {', '.join(f'`{f}`' for f in found)}" for what, found in fields_of(layers).items())
    spec = first.spec
    if spec is None:
        return f"| {where} | reads the cache of {first.shares} | | 0 | {fields} |"
    extra = ", ".join(f"{n} {getattr(spec, n)}" for n in ("window", "chunk") if hasattr(spec, n))
    kind = type(spec).__name__ + (f" ({extra})" if extra else "")
    if isinstance(spec, Mamba):
        shapes = " + ".join(f"{list(shape)} {dtype}" for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True))
        return f"| {where} | {kind} | {spec.shapes[-1][0]} | {spec.unpadded_page_size_bytes:,}: {shapes} | {fields} |"
    assert isinstance(spec, AttentionSpec)
    cell = f"{spec.num_heads * spec.content_bytes:,}"
    if spec.tokens_per_state != 1:
        cell += f" for {spec.tokens_per_state} tokens"
    return f"| {where} | {kind} | {spec.num_heads} | {cell} | {fields} |"


def fields_of(layers: list[CacheLayer]) -> dict[str, list[str]]:
    """Fields by what they decide; `layer_types[3]` and its like shortened to one."""
    found: dict[str, list[str]] = {}
    for layer in layers:
        for what, fields in layer.fields.items():
            short = [f"{field.partition('[')[0]}[i]" if "[" in field else field for field in fields]
            for field in short:
                if field not in found.setdefault(what, []):
                    found[what].append(field)
    return {what: fields for what, fields in found.items() if fields}


def ranges(indices: list[int]) -> str:
    """`0-4, 6-10, ...`, or with a step where there is one: `3, 7, ... 47`."""
    steps = {b - a for a, b in itertools.pairwise(indices)}
    if len(steps) == 1 and steps != {1} and len(indices) > 2:
        return f"{indices[0]}, {indices[1]}, ... {indices[-1]} ({len(indices)})"
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    shown = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return ", ".join(shown if len(shown) < 6 else [*shown[:3], "...", shown[-1]]) + f" ({len(indices)})"


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    TARGET.write_text(document(), encoding="utf-8")


if __name__ == "__main__":
    main()
