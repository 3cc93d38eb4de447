"""vLLM's answers for a model under every type of the cache on several GPUs, compactly, to hold HKV's plan against."""

from __future__ import annotations

import dataclasses
import gzip
import itertools
import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.judges.recorded import published
from hkv.dialects.vllm.planning.engine_options import EngineOptions
from hkv.dialects.vllm.planning.engine_plan import plan_config
from hkv.errors import HKVError
from hkv.model.huggingface.common_fields import SCHEMES

DEVICES = ("h100", "b200", "a100", "l40s", "rtx5090")
"""GPUs of compute capabilities 9.0, 10.0, 8.0, 8.9 and 12.0."""

MEMORY = 80 << 30
"""Bytes for the cache on each of them."""

Answer = tuple[int, str]
"""Blocks, and the line that is logged."""


@dataclasses.dataclass(frozen=True)
class TypeDifference:
    """A start of which HKV says something else than vLLM.

    Attributes:
      model: the model's name.
      device: the GPU's.
      dtype: value of `--kv-cache-dtype`.
      ours: HKV's answer, or why it refuses.
      theirs: vLLM's, or None.
    """

    model: str
    device: str
    dtype: str
    ours: Answer | str
    theirs: Answer | None

    @property
    def known(self) -> str:
        """Name of the upstream defect, or of HKV's limit, for which it refuses what vLLM plans; or nothing.

        `docs/planning.md` has them.
        """
        if self.theirs is None or not isinstance(self.ours, str):
            return ""
        if self.model.startswith("mimo-v2"):
            return "named-kernels-not-asked"
        if self.dtype == "nvfp4_ds_mla":
            return "latent-packing-of-keys"
        if "picked keys" in self.ours:
            return "packing-beside-picked-keys"
        packed = self.dtype.startswith(("turboquant_", "ultraquant_"))
        return "kept-layers-change-the-type" if packed and "with an indexer" in self.ours else ""

    def __str__(self) -> str:
        return f"{self.model} {self.device} {self.dtype}: {self.ours} here, {self.theirs or 'refused'} in vLLM"


@dataclasses.dataclass(frozen=True)
class TypeAnswers:
    """A model's answers.

    Attributes:
      model: its name.
      planned: each answer that is not a refusal, once.
      table: for each device each type's index into them, or -1.
    """

    model: str
    planned: list[Answer]
    table: dict[str, dict[str, int]]

    @classmethod
    def of(cls, model: str, found: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> TypeAnswers:
        """Of vLLM's answers by device and type."""
        planned: list[Answer] = []
        table: dict[str, dict[str, int]] = {}
        for device, types in found.items():
            for dtype, answer in types.items():
                table.setdefault(device, {})[dtype] = -1
                if "refused" not in answer:
                    value = (answer["num_blocks"], answer["line"])
                    if value not in planned:
                        planned.append(value)
                    table[device][dtype] = planned.index(value)
        return cls(model, planned, table)

    @classmethod
    def read(cls, line: str) -> TypeAnswers:
        """From a line that `line` made."""
        model, types, planned, table = json.loads(line)
        rows = {device: dict(zip(types, row, strict=True)) for device, row in table.items()}
        return cls(model, [(blocks, said) for blocks, said in planned], rows)

    def line(self) -> str:
        """As a line of JSON."""
        types = list(next(iter(self.table.values())))
        rows = {device: list(row.values()) for device, row in self.table.items()}
        return json.dumps([self.model, types, self.planned, rows], separators=(",", ":"))

    def answers(self) -> Iterator[tuple[str, str, Answer | None]]:
        """Device, type and answer; None for a refusal."""
        for device, row in self.table.items():
            for dtype, index in row.items():
                yield device, dtype, None if index < 0 else self.planned[index]


def asking() -> dict[str, dict[str, Any]]:
    """Published files that ask for a type of the cache themselves, by name."""
    files = {name: each["config"] for name, each in published().items()}
    quantized = {name: file.get("quantization_config", {}) for name, file in files.items()}
    return {name: files[name] for name, found in quantized.items() if any(found.get(field) for field in SCHEMES)}


def recorded(path: pathlib.Path) -> Iterator[TypeAnswers]:
    """Answers that `benchmarks/compare_cache_types.py --record` wrote."""
    for line in gzip.decompress(path.read_bytes()).decode().splitlines():
        yield TypeAnswers.read(line)


def differences(
    config: Mapping[str, Any], record: TypeAnswers, first: int = 0, step: int = 1
) -> Iterator[TypeDifference]:
    """Starts of which HKV says something else.

    Args:
      config: the model's `config.json`.
      record: vLLM's answers.
      first: the first answer to look at.
      step: the distance to the next.
    """
    for device, dtype, theirs in itertools.islice(record.answers(), first, None, step):
        ours: Answer | str
        try:
            options = EngineOptions(device=device, kv_cache_dtype=dtype, kv_cache_memory_bytes=MEMORY)
            plan = plan_config(config, options)
            ours = plan.num_blocks, plan.startup.line
        except HKVError as error:
            ours = str(error)
        if (None if isinstance(ours, str) else ours) != theirs:
            yield TypeDifference(record.model, device, dtype, ours, theirs)
