"""Options that vLLM 0.33 refuses of a model, held against its recorded configs."""

from __future__ import annotations

from benchmarks.judges.recorded import records
from hkv.dialects.vllm.planning.model_checks import EXPERTS, WITH_EXPERTS
from hkv.errors import HKVError
from hkv.model.huggingface.reading import decoder_fields


def test_types_with_experts_are_those_whose_default_config_has_some() -> None:
    found: dict[str, set[bool]] = {}
    for record in records("library"):
        try:
            fields = decoder_fields(record["config"])
        except HKVError:
            continue
        stated = [fields.values[name] for name in EXPERTS if fields.values.get(name) is not None]
        found.setdefault(fields.model_type, set()).add(bool(stated and stated[0]))
    assert {name for name, some in found.items() if some == {True}} == WITH_EXPERTS
    assert all(len(some) == 1 for some in found.values())
