"""Layouts as an installed vLLM 0.33 computes them: strides and views, as plain values."""

from __future__ import annotations

import importlib
import random
from fractions import Fraction
from typing import Any

from benchmarks.installed_planning import InstalledPlanner
from hkv.layout.block_layout import Order
from hkv.spec import KINDS

SEED = 20240


class InstalledLayouts:
    """The layout functions of an installed vLLM.

    Raises:
      MissingEngineError: vLLM is not installed.
    """

    def __init__(self) -> None:
        self._planner = InstalledPlanner()
        self._torch: Any = importlib.import_module("torch")
        self._interface: Any = importlib.import_module("vllm.v1.kv_cache_interface")
        self._layouts: Any = importlib.import_module("vllm.v1.kv_cache_layout").KVCacheLayout

    def answer(self, case: dict[str, Any]) -> dict[str, Any]:
        """The manager's strides, and shape, strides and offset of each layer's view, in bytes.

        Args:
          case: one of `random_cases`.

        Returns:
          `{"strides": [5], "views": [{"shape", "strides", "offset"}, ...]}`, or `{"refused": message}`.
        """
        spec = self._planner.spec(spec_of(case))
        layout = self._layouts[case["order"]]
        try:
            strides = self._interface.compute_layout_strides(
                spec,
                case["num_blocks"],
                case["num_layers"],
                layout,
                fixed_strides=(case["layer_stride"], case["block_stride"], None, None, None),
            )
            return {"strides": list(strides), "views": self._views(spec, layout, strides, case)}
        except (AssertionError, ValueError, RuntimeError) as error:
            return {"refused": " ".join(f"{type(error).__name__}: {error}".split())}

    def _views(self, spec: Any, layout: Any, strides: tuple[int, ...], case: dict[str, Any]) -> list[dict[str, Any]]:
        shape = (case["num_layers"], case["num_blocks"], spec.num_heads, spec.num_states, spec.state_content_size_bytes)
        end = case["offset"] + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1
        tensor = self._interface.KVCacheTensor(
            size=end,
            layers=[f"layer{index}" for index in range(case["num_layers"])],
            layer_stride=strides[0],
            block_stride=strides[1],
            offset=case["offset"],
        )
        raw = self._torch.zeros(end, dtype=self._torch.int8)
        views = self._interface.create_kv_cache_views(
            raw, spec, case["num_blocks"], layout, tensor, kernel_block_size=case["kernel_block_size"]
        )
        return [
            {
                "shape": list(view.shape),
                "strides": [stride * view.element_size() for stride in view.stride()],
                "offset": view.storage_offset() * view.element_size(),
            }
            for view in views
        ]


def spec_of(case: dict[str, Any]) -> Any:
    """The HKV spec that a case describes."""
    fields = dict(case["spec"])
    if "tokens_per_state" in fields:
        fields["tokens_per_state"] = int(share) if (share := Fraction(fields["tokens_per_state"])) >= 1 else share
    for name in ("shapes", "dtypes"):
        if name in fields:
            fields[name] = tuple(tuple(item) if isinstance(item, list) else item for item in fields[name])
    return KINDS[fields.pop("kind")](**fields)


def random_cases(count: int, seed: int = SEED) -> list[dict[str, Any]]:
    """Layouts of random specs, legal and not, as plain values: the same ones for the same seed."""
    draw = random.Random(seed)
    return [_random_case(draw) for _ in range(count)]


def _random_case(draw: random.Random) -> dict[str, Any]:
    spec = _random_spec(draw)
    case: dict[str, Any] = {
        "spec": spec,
        "order": draw.choice([order.value for order in Order]),
        "num_layers": draw.choice([1, 1, 2, 3, 5]),
        "num_blocks": draw.choice([1, 2, 3, 4, 7]),
        "layer_stride": None,
        "block_stride": None,
        "offset": draw.choice([0, 0, 8, 48]),
        "kernel_block_size": None,
    }
    real = spec_of(case)
    if draw.random() < 0.3 and real.page_size_bytes:
        case["block_stride"] = case["num_layers"] * real.page_size_bytes + draw.choice([0, 8, 64])
        case["layer_stride"] = real.page_size_bytes
    if draw.random() < 0.4:
        case["kernel_block_size"] = draw.choice([k for k in range(1, 33) if spec["block_size"] % k == 0])
    return case


def _random_spec(draw: random.Random) -> dict[str, Any]:
    block_size = draw.choice([1, 2, 4, 8, 12, 16, 32])
    kind = draw.choice(["full_attention", "full_attention", "sliding_window", "chunked_local", "mla", "mamba"])
    if KINDS[kind].snapshot:
        shapes = [[draw.randint(1, 4) for _ in range(draw.randint(1, 3))] for _ in range(draw.randint(1, 3))]
        spec = {"kind": kind, "block_size": block_size, "shapes": shapes}
        spec["dtypes"] = [draw.choice(["float32", "bfloat16"]) for _ in shapes]
        return spec | _padding(draw, spec)
    spec = {
        "kind": kind,
        "block_size": block_size,
        "num_kv_heads": 1 if getattr(KINDS[kind], "single_vector", False) else draw.randint(1, 4),
        "head_size": draw.randint(1, 9),
        "dtype": draw.choice(["bfloat16", "float32", "uint8", "float8_e4m3fn"]),
    }
    if not getattr(KINDS[kind], "single_vector", False) and draw.random() < 0.3:
        spec["head_size_v"] = draw.randint(0, 9)
    if draw.random() < 0.2:
        spec["tokens_per_state"] = draw.choice(["2", "4", "1/2"])
    if draw.random() < 0.15:
        spec["state_content_bytes"] = draw.choice([12, 24, 132])
    spec |= {"sliding_window": {"window": 8}, "chunked_local": {"chunk": 8}}.get(kind, {})
    return spec | _padding(draw, spec)


def _padding(draw: random.Random, spec: dict[str, Any]) -> dict[str, Any]:
    page = spec_of({"spec": spec}).page_size_bytes
    if draw.random() < 0.25 and page:
        return {"page_size_padded": page + draw.choice([0, 4, 16, 100])}
    return {}
