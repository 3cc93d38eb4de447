"""Groups of vLLM's that a log cannot describe are refused by their names. Skipped where vLLM is absent."""

from __future__ import annotations

import pathlib
from types import SimpleNamespace
from typing import Any

import pytest

from hkv.dialects.vllm.attach.header import header_from
from hkv.errors import UnsupportedConfigError
from tests.attach.test_live_vllm import manager_of
from tests.oracle import sample

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "oplog.md"


def group(name: str) -> Any:
    """One group of each sort that is left out, by the name under which it is refused."""
    import torch
    from vllm.v1 import kv_cache_interface as vllm

    geometry: dict[str, Any] = {"block_size": 2, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    full = vllm.FullAttentionSpec(**geometry)
    window = vllm.SlidingWindowSpec(**geometry, sliding_window=4)
    spec, role = {
        "EncoderOnlyAttentionSpec": lambda: (vllm.EncoderOnlyAttentionSpec(**geometry), "DEFAULT"),
        "RSWASpec": lambda: (vllm.RSWASpec(**geometry, rswa_window=4), "DEFAULT"),
        "SinkFullAttentionSpec": lambda: (vllm.SinkFullAttentionSpec(**geometry, sink_len=2), "DEFAULT"),
        "HiSparseHotSpec": lambda: (
            vllm.HiSparseHotSpec(block_size=2, page_size=64, blocks_per_request=2),
            "DEFAULT",
        ),
        "HiSparseResidentSpec": lambda: (vllm.HiSparseResidentSpec(block_size=2, page_size=64), "DEFAULT"),
        "role HISPARSE_SOURCE": lambda: (full, "HISPARSE_SOURCE"),
        "role HISPARSE_INDEXER": lambda: (full, "HISPARSE_INDEXER"),
        "UniformTypeKVCacheSpecs": lambda: (
            vllm.UniformTypeKVCacheSpecs(block_size=2, kv_cache_specs={"a": full, "b": window}),
            "DEFAULT",
        ),
    }[name]()
    return vllm.KVCacheGroupSpec(["layer"], spec, role=vllm.KVCacheGroupRole[role])


NAMES = (
    "EncoderOnlyAttentionSpec",
    "RSWASpec",
    "SinkFullAttentionSpec",
    "HiSparseHotSpec",
    "HiSparseResidentSpec",
    "role HISPARSE_SOURCE",
    "role HISPARSE_INDEXER",
    "UniformTypeKVCacheSpecs",
)


@pytest.mark.parametrize("name", NAMES)
def test_a_group_that_a_log_cannot_describe_is_refused_by_its_name(name: str) -> None:
    manager = manager_of(sample.header(oplog=3, num_blocks=12))
    manager.kv_cache_config = SimpleNamespace(kv_cache_groups=[group(name)])
    with pytest.raises(UnsupportedConfigError, match=name):
        header_from(manager)
    assert f"| `{name}` |" in PAGE.read_text()


def test_every_class_of_specs_is_described_or_refused() -> None:
    """A class that a later vLLM adds is missed by nobody."""
    from vllm.v1 import kv_cache_interface as vllm

    from hkv.dialects.vllm.engines.vllm_objects import KINDS_BY_CLASS

    classes = {
        name
        for name, value in vars(vllm).items()
        if isinstance(value, type) and issubclass(value, vllm.KVCacheSpec) and value is not vllm.KVCacheSpec
    }
    assert classes - {"AttentionSpec", *NAMES} == set(KINDS_BY_CLASS)
