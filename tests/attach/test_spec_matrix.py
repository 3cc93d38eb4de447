"""Every class of vLLM 0.33's specs, with KV events and without: recorded, shadowed, judged, or refused by name."""

from __future__ import annotations

import inspect
import pathlib
from types import SimpleNamespace
from typing import Any

import pytest

from hkv.contract import registry
from hkv.dialects.vllm.attach.header import header_from
from hkv.dialects.vllm.log.structs import EventsOp
from hkv.errors import UnsupportedConfigError
from hkv.oracle.attach.attach import AttachSettings, Session
from hkv.oracle.check import check_log, judge_log
from hkv.oracle.engines import engine_factory
from hkv.oracle.log_file import read_log

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "oplog.md"

UNMANAGED = {
    "EncoderOnlyAttentionSpec": "No manager registered",
    "SinkFullAttentionSpec": "unexpected keyword argument 'needs_kv_cache_zeroing'",
    "UniformTypeKVCacheSpecs": "kv_cache_specs",
}
"""Classes of which vLLM 0.33 itself makes no manager, and its own words for that."""

REFUSED = ("HiSparseHotSpec", "HiSparseResidentSpec", "RSWASpec")
"""Classes without words in a log; every other is recorded."""

ALONE = ("FullAttentionSpec", "CrossAttentionSpec", "CircularBufferSpec")
"""Classes that no event but full attention's is about: it itself, and those that are never cached."""

SPEC_FIELDS: dict[str, Any] = {
    "block_size": 4,
    "num_kv_heads": 1,
    "head_size": 8,
    "sliding_window": 6,
    "attention_chunk_size": 8,
    "shapes": ((4,),),
    "sink_len": 4,
    "mamba_cache_mode": "align",
    "rswa_window": 6,
    "page_size": 64,
    "blocks_per_request": 4,
}


def classes() -> list[str]:
    """Names of the concrete classes of specs, or of those known where vLLM is not installed."""
    try:
        from vllm.v1 import kv_cache_interface as vllm
    except ImportError:
        return ["SlidingWindowMLASpec"]
    found = [each for _, each in inspect.getmembers(vllm, inspect.isclass) if issubclass(each, vllm.KVCacheSpec)]
    return sorted({each.__name__ for each in found} - {"KVCacheSpec", "AttentionSpec"})


def spec(name: str) -> Any:
    """A spec of that class."""
    import torch
    from vllm.v1 import kv_cache_interface as vllm

    cls = getattr(vllm, name)
    given = {"dtype": torch.bfloat16, "dtypes": (torch.float32,), **SPEC_FIELDS}
    return cls(**{field: value for field, value in given.items() if field in cls.__dataclass_fields__})


def manager(name: str, events: bool) -> Any:
    """A manager of one group of that class, beside full attention where it cannot be alone."""
    from vllm.v1 import kv_cache_interface as vllm
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    specs = [spec(each) for each in dict.fromkeys(("FullAttentionSpec", name))]
    groups = [vllm.KVCacheGroupSpec([f"layer{index}"], spec) for index, spec in enumerate(specs)]
    config = vllm.KVCacheConfig(num_blocks=40, kv_cache_tensors=[], kv_cache_groups=groups)
    return KVCacheManager(
        config,
        max_model_len=64,
        scheduler_block_size=4,
        hash_block_size=4,
        enable_caching=name != "CrossAttentionSpec",
        enable_kv_cache_events=events,
    )


def drive(live: Any) -> None:
    """Prompts that share a beginning, in two chunks each, with their events."""
    from tests.attach.test_live_vllm import request_of

    for number in range(3):
        request = request_of(f"r{number}", [*range(1, 13), number, 20, 21, 22], size=4)
        live.new_step_starts()
        _, hit, _ = live.get_computed_blocks(request)
        live.allocate_slots(request, 12 - hit, hit, live.get_computed_blocks(request)[0])
        request.num_computed_tokens = 12
        live.take_events()
        live.new_step_starts()
        live.allocate_slots(request, 4)
        request.num_computed_tokens = 16
        live.take_events()
        live.free(request)
    live.take_events()


@pytest.mark.parametrize("events", [True, False], ids=["events", "none"])
@pytest.mark.parametrize("name", classes())
def test_a_class_is_told_rightly_or_refused(name: str, events: bool, tmp_path: pathlib.Path) -> None:
    from hkv.dialects.vllm.attach.attach import attach

    if name in UNMANAGED:
        with pytest.raises((AssertionError, TypeError), match=UNMANAGED[name]):
            manager(name, events)
        return
    if name in REFUSED:
        live = manager(name, events)
        with pytest.raises(
            UnsupportedConfigError, match=rf"groups\[1\] = '{name}': expected one of .*FullAttentionSpec"
        ):
            attach(live, Session(AttachSettings(folder=str(tmp_path))))
        return
    for mode in ("record", "shadow"):
        session = Session(AttachSettings(folder=str(tmp_path), mode=mode, states="step"))
        session.label = mode
        live = manager(name, events)
        attach(live, session)
        drive(live)
        session.close()
        assert [shadow.difference for shadow in session.shadows] == [None] * (mode == "shadow"), mode
    log = read_log(tmp_path / "record-1.jsonl")
    assert registry.dialect_of(log.header.dialect).ended(log) == ""
    published = [event for each in log.operations if isinstance(each, EventsOp) for event in each.want or ()]
    told = {event.spec_kind for event in published if event.type == "stored" and event.num_blocks}
    assert bool(published) == (events and name != "CrossAttentionSpec")
    assert not events or told - {"full_attention"} or name in ALONE
    assert check_log(log, engine_factory("numpy")) is None
    assert judge_log(log)[0] is None


ROLES = ("role HISPARSE_SOURCE", "role HISPARSE_INDEXER")


def refused_group(name: str) -> Any:
    """A group of each sort that is left out, by the name under which it is refused."""
    from vllm.v1 import kv_cache_interface as vllm

    if name == "UniformTypeKVCacheSpecs":
        layers = {"a": spec("FullAttentionSpec"), "b": spec("SlidingWindowSpec")}
        return vllm.KVCacheGroupSpec(["layer"], vllm.UniformTypeKVCacheSpecs(block_size=4, kv_cache_specs=layers))
    role = name.removeprefix("role ") if name in ROLES else "DEFAULT"
    found = spec("FullAttentionSpec" if name in ROLES else name)
    return vllm.KVCacheGroupSpec(["layer"], found, role=vllm.KVCacheGroupRole[role])


@pytest.mark.parametrize("name", [*UNMANAGED, *REFUSED, *ROLES])
def test_a_group_that_a_log_cannot_describe_is_refused_by_its_name(name: str) -> None:
    live = manager("FullAttentionSpec", True)
    live.kv_cache_config = SimpleNamespace(kv_cache_groups=[refused_group(name)])
    with pytest.raises(UnsupportedConfigError, match=name):
        header_from(live)
    assert f"| `{name}` |" in PAGE.read_text()


def test_every_class_of_specs_is_described_or_refused() -> None:
    """A class that a later vLLM adds is missed by nobody."""
    from hkv.dialects.vllm.engines.vllm_objects import KINDS_BY_CLASS

    assert {*classes()} - {*UNMANAGED, *REFUSED} == set(KINDS_BY_CLASS)
