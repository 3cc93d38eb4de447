"""Records the metadata classes of the packages in which JAX engines keep them, from the sources in their wheels.

Example: pip download --no-deps -d WHEELS tpu-inference==0.32.0 sglang-jax==0.0.2
         python benchmarks/record_engine_metadata.py WHEELS > tests/data/engine_metadata.json
"""

from __future__ import annotations

import argparse
import ast
import json
import pathlib
import zipfile

CLASSES = {
    "tpu_inference": ("tpu_inference/layers/common/attention_metadata.py", "AttentionMetadata"),
    "sglang_jax": ("sgl_jax/srt/layers/attention/flashattention_backend.py", "FlashAttentionMetadata"),
}
"""By package: the file in its wheel, and the class."""


def fields(source: str, name: str) -> dict[str, dict[str, str]]:
    """Fields of a dataclass by name, in order: the annotation, and the default where there is one."""
    found = next(node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == name)
    described: dict[str, dict[str, str]] = {}
    for node in found.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            default = {} if node.value is None else {"default": ast.unparse(node.value)}
            described[node.target.id] = {"type": ast.unparse(node.annotation), **default}
    return described


def main() -> None:
    """Prints one JSON object: by package its version, the class, and the fields."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheels", type=pathlib.Path)
    folder = parser.parse_args().wheels
    recorded = {}
    for package, (path, name) in CLASSES.items():
        (wheel,) = folder.glob(f"{package}-*.whl")
        with zipfile.ZipFile(wheel) as opened:
            source = opened.read(path).decode()
        version = wheel.name.split("-")[1]
        recorded[package] = {"version": version, "class": name, "fields": fields(source, name)}
    print(json.dumps(recorded, indent=1))


if __name__ == "__main__":
    main()
