"""Every family's fields: each default is what the family does without the field, and nothing unknown is read over."""

from __future__ import annotations

import contextlib
import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.draft_classes import DATA
from hkv.dialects.vllm.planning.engine_options import EngineOptions
from hkv.dialects.vllm.planning.engine_plan import read_models
from hkv.dialects.vllm.planning.speculation import speculation_of
from hkv.errors import ConfigError, HKVError
from hkv.model.huggingface import Model, ReadOptions, read_model
from hkv.model.huggingface.common_fields import LENGTHS
from hkv.model.huggingface.families import known_families, readers
from hkv.model.huggingface.family import INERT, ONLY, REQUIRED, WRAPPERS, table_of, type_of
from hkv.model.huggingface.reading import DERIVED, decoder_fields, known_around, known_inside, read_fields
from hkv.model.released import released_models

FAMILIES = known_families()

NEEDED: dict[str, Any] = {
    "block_configs": [{"attention": {"no_op": index % 3 == 2, "n_heads_in_group": 4}} for index in range(8)],
    "architectures": ["BailingMoeV3ForCausalLM"],
    "encoder": {"n_heads": 8, "subsampling_factor": 8, "patch_size": 16},
    "head_dim": 128,
    "hidden_size": 4096,
    "index_head_dim": 128,
    "kv_lora_rank": 512,
    "layer_group_size": 4,
    "layers": [{"kind": "full_attention", "count": 4, "kv_heads": 8, "head_dim": 128}],
    "max_audio_clip_s": 35,
    "max_position_embeddings": 8192,
    "max_window_layers": 8,
    "num_attention_heads": 32,
    "num_hidden_layers": 8,
    "num_key_value_heads": 8,
    "qk_rope_head_dim": 64,
    "sliding_window": 128,
    "sliding_window_size": 513,
    "swa_kv_lora_rank": 1024,
    "swa_qk_rope_head_dim": 64,
    "transf_decoder": {"config_dict": {"hidden_size": 1024, "num_attention_heads": 8, "num_layers": 8}},
    "v_head_dim": 64,
}
"""Values for fields that a file must have."""

GLOBAL = {
    "dtype",
    "torch_dtype",
    "rope_scaling",
    "rope_parameters",
    "quantization_config",
    "original_max_position_embeddings",
}
"""Fields that every family reads alike: the element type, the longest request, the packing of the cache."""


def whole(model_type: str) -> dict[str, Any]:
    """A config with each of the family's fields that has a default, or must be there."""
    config: dict[str, Any] = {"model_type": model_type}
    for name, default in FAMILIES[model_type].fields.items():
        if default is REQUIRED:
            config[name] = NEEDED.get(name, ["full_attention"] * config.get("num_hidden_layers", 32))
        elif default is not None:
            config[name] = copy.deepcopy(default)
    return config


def answer(model: Model) -> tuple[object, int]:
    return model.specs, model.max_model_len


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_a_missing_field_is_the_default_and_is_noted(model_type: str) -> None:
    config, family = whole(model_type), FAMILIES[model_type]
    expected = read_model(config)
    assert not any(
        "not in the file" in note and "dtype" not in note and "at most" not in note for note in expected.notes
    )
    used = set()
    for name, default in family.fields.items():
        if name not in config:
            continue
        fewer = {key: value for key, value in config.items() if key != name}
        if default is REQUIRED:
            with contextlib.suppress(ConfigError):
                assert answer(read_model(fewer)) == answer(expected), "not needed with these other fields"
                continue
            with pytest.raises(ConfigError, match=name):
                read_model(fewer)
            continue
        model = read_model(fewer)
        assert answer(model) == answer(expected), name
        note = f"{name} = {json.dumps(default)}, {family.name}'s default: not in the file"
        if note in model.notes:
            used.add(name)
    assert used or not any(default not in (None, REQUIRED) for default in family.fields.values())


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_unknown_fields_are_noted_where_vllm_never_reads_them_and_refused_elsewhere(model_type: str) -> None:
    config, plain = whole(model_type), answer(read_model(whole(model_type)))
    unknown = {"memory_tokens": 17, "memory_kind": "long"}
    assert answer(read_model(config | dict.fromkeys(unknown))) == plain, "a null says nothing"
    if model_type in read_fields():
        model = read_model(config | unknown)
        assert answer(model) == plain
        assert any('memory_tokens = 17, memory_kind = "long"' in note for note in model.notes), "one note"
    else:
        with pytest.raises(ConfigError, match="memory_tokens, memory_kind = "):
            read_model(config | unknown)
    for options in (ReadOptions(strict=True), ReadOptions(draft=True)):
        with pytest.raises(ConfigError, match="memory_tokens = 17"):
            read_model(config | {"memory_tokens": 17}, options)
    ignoring = read_model(config | unknown, ReadOptions(strict=True, ignore_fields=tuple(unknown)))
    assert answer(ignoring) == plain
    assert 'ignored, as asked: memory_tokens = 17, memory_kind = "long"' in ignoring.notes


@pytest.mark.parametrize("model_type", sorted(FAMILIES.keys() & read_fields().keys()))
def test_every_field_that_vllm_reads_and_hkv_does_not_is_refused_in_one_message(model_type: str) -> None:
    config = whole(model_type)
    names = sorted(read_fields()[model_type] - known_inside(decoder_fields(config)) - DERIVED.keys())
    assert names, "such as `generator`, of every type"
    with pytest.raises(ConfigError) as refused:
        read_model(config | dict.fromkeys(names, 17) | {"memory_tokens": 17})
    assert refused.value.argument == ", ".join(names)
    ignoring = read_model(config | dict.fromkeys(names, 17), ReadOptions(ignore_fields=tuple(names)))
    assert answer(ignoring) == answer(read_model(config))


def test_heads_that_follow_from_other_fields_are_noted() -> None:
    llama = whole("llama")
    lacking = {name: value for name, value in llama.items() if name != "num_key_value_heads"}
    heads = llama["num_attention_heads"]
    note = f"num_key_value_heads = {heads}, from num_attention_heads: the file has none"
    assert note in read_model(lacking).notes
    assert not read_model(lacking | {"num_key_value_heads": heads, "head_dim": 128}).notes[1:], "the element type alone"
    mimo = read_model(whole("mimo_v2_flash")).notes
    for name in ("swa_num_key_value_heads", "swa_head_dim", "swa_v_head_dim"):
        assert any(note.startswith(f"{name} = ") for note in mimo)


def test_a_field_that_decides_cannot_be_ignored() -> None:
    for name in ("hidden_size", "is_decoder", "max_position_embeddings"):
        with pytest.raises(ConfigError, match=f"ignore_fields = '{name}'"):
            read_model(whole("llama"), ReadOptions(ignore_fields=(name,)))


@pytest.mark.parametrize(
    ("config", "missing"),
    [
        ({"model_type": "glm5_next", "text_config": {"model_type": "glm5_next_text"}}, "Glm5NextTailCache"),
        ({"model_type": "glm5_next_text", "num_hidden_layers": 45}, "Glm5NextTailCache"),
        ({"model_type": "step5", "num_hidden_layers": 45, "sparse_config": {}}, "Step5CSATailRing"),
        ({"model_type": "step5_vl", "text_config": {"model_type": "step5"}}, "Step5CSATailRing"),
    ],
)
def test_a_family_with_a_cache_that_no_reader_makes_is_refused_by_it(config: dict[str, Any], missing: str) -> None:
    with pytest.raises(ConfigError, match=missing) as found:
        read_model(config)
    assert (found.value.argument, found.value.value) == ("model_type", config["model_type"])
    drafting = speculation_of({"method": "mtp", "num_speculative_tokens": 1})
    with pytest.raises(ConfigError, match=missing):
        read_models(config, EngineOptions(kv_cache_memory_bytes=1 << 30, speculation=drafting))


def test_causes_of_a_refusal_are_told_apart() -> None:
    config = whole("llama")
    with pytest.raises(ConfigError, match=r"remote code \(auto_map, configuration_x.XConfig\)"):
        read_model(config | {"model_type": "x", "auto_map": {"AutoConfig": "configuration_x.XConfig"}})
    with pytest.raises(ConfigError, match=r"rope_scaling\.factor = None"):
        read_model(config | {"rope_scaling": {"rope_type": "yarn"}})
    packed = config | {"quantization_config": {"quant_method": "bitsandbytes"}}
    with pytest.raises(ConfigError, match=r"quantization_config\.quant_method = 'bitsandbytes'"):
        read_model(packed)
    ignoring = read_model(packed, ReadOptions(ignore_fields=("quantization_config",)))
    assert answer(ignoring) == answer(read_model(config))
    assert "ignored, as asked: quantization_config" in ignoring.notes


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_inert_fields_change_nothing(model_type: str) -> None:
    config, own = whole(model_type), FAMILIES[model_type].known | set(LENGTHS) | GLOBAL
    noise = dict.fromkeys(INERT - own - {"architectures", "model_type"}, 77)
    assert answer(read_model(config | noise)) == answer(read_model(config))


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_fields_of_all_families_are_inert_at_one_value_only(model_type: str) -> None:
    family = FAMILIES[model_type]
    for name, value in {**ONLY, **family.only}.items():
        if name in family.fields or name in family.known - family.only.keys():
            continue
        assert answer(read_model(whole(model_type) | {name: value})) == answer(read_model(whole(model_type)))
        if value is not None or name in family.only:
            with pytest.raises(ConfigError, match=name):
                read_model(whole(model_type) | {name: "otherwise"})


@pytest.mark.parametrize("outer", sorted(name for name, wrapper in WRAPPERS.items() if wrapper.decoder))
def test_a_wrapper_reads_its_decoder_and_refuses_what_it_does_not_know(outer: str) -> None:
    wrapper = WRAPPERS[outer]
    inner = whole(wrapper.decoder)
    plain = read_model(inner)
    del inner["model_type"]
    config: dict[str, Any] = inner
    for key in reversed(wrapper.keys):
        config = {key: config}
    config["model_type"] = outer
    assert answer(read_model(config)) == answer(plain)
    beside = config | {"memory_tokens": 17}
    if outer in read_fields():
        assert any("memory_tokens = 17" in note for note in read_model(beside).notes)
        names = sorted(read_fields()[outer] - known_around(outer))
        with pytest.raises(ConfigError, match=", ".join(names)):
            read_model(config | dict.fromkeys(names, 17))
    with pytest.raises(ConfigError, match="memory_tokens = 17"):
        read_model(beside, ReadOptions(strict=True))


RELEASED: dict[str, dict[str, Any]] = {}
for _model in released_models():
    try:
        read_model(_model.config())
    except HKVError:
        continue
    RELEASED[_model.name] = _model.config()


def places(config: dict[str, Any]) -> list[tuple[str, ...]]:
    """The decoder's fields of a config, as paths of keys."""
    fields = decoder_fields(config)
    prefix = tuple(part for part in fields.path.split(".") if part)
    return [(*prefix, name) for name in fields.values]


def without(config: dict[str, Any], place: tuple[str, ...]) -> dict[str, Any]:
    config = copy.deepcopy(config)
    inner = config
    for part in place[:-1]:
        inner = inner[part]
    del inner[place[-1]]
    return config


def put(config: dict[str, Any], place: tuple[str, ...], value: object) -> dict[str, Any]:
    config = copy.deepcopy(config)
    inner = config
    for part in place[:-1]:
        inner = inner[part]
    inner[place[-1]] = value
    return config


def check_change(before: Model, after: Model, place: tuple[str, ...], config: dict[str, Any]) -> None:
    """Makes sure that no layer changed that the field does not govern, and none at all if the field is inert."""
    fields, name, path = decoder_fields(config), place[-1], ".".join(place)
    deciding = fields.family.spellings.get(name, name) in fields.family.fields
    if name in GLOBAL or fields.family.spellings.get(name, name) in ("num_hidden_layers", "num_layers", "model_type"):
        return
    if not deciding:
        assert before.specs == after.specs, f"{path} is inert"
        assert before.max_model_len == after.max_model_len or name in LENGTHS
        return
    old, new = before.specs, after.specs
    if old.keys() != new.keys():  # caches next to a layer's own come and go with its kind
        old = {key: spec for key, spec in old.items() if key in new}
    changed = {key for key, spec in old.items() if new[key] != spec}
    governed = {
        layer.name
        for model in (before, after)
        for layer in model.layers
        if any(field == path or field.startswith((f"{path}[", f"{path}.")) for field in layer.governed_by)
    }
    assert changed <= governed, f"{path} governs only {sorted(governed)[:3]}"


@given(data=st.data(), name=st.sampled_from(sorted(RELEASED)))
def test_a_field_taken_from_a_released_file_changes_what_it_governs_or_is_refused(
    data: st.DataObject, name: str
) -> None:
    config = RELEASED[name]
    place = data.draw(st.sampled_from(places(config)))
    before = read_model(config)
    try:
        after = read_model(without(config, place))
    except HKVError:
        return
    check_change(before, after, place, config)
    fields = decoder_fields(config)
    meant = fields.family.spellings.get(place[-1], place[-1])
    if meant in fields.family.fields and answer(before) != answer(after):
        assert any(meant in note or "derive" in note for note in after.notes) or fields.family.fields[meant] is None


def test_every_reader_reads_a_family() -> None:
    assert set(readers()) == {block["read"] for block in table_of("families.toml")["family"]}
    assert len(FAMILIES) > 140


LING = json.loads((DATA / "draft_cases.json").read_text(encoding="utf-8"))["ling 3"]["target"]


def test_a_file_of_ling_3_is_read_at_once_with_and_without_its_type() -> None:
    """Its class in vLLM 0.33 reads none of the fields that HKV passes over."""
    untyped = {name: value for name, value in LING.items() if name != "model_type"}
    assert answer(read_model(LING)) == answer(read_model(untyped))
    assert read_model(LING, ReadOptions(strict=True)).specs == read_model(LING).specs


@pytest.mark.parametrize("name", sorted(RELEASED))
def test_the_architecture_says_the_type_of_a_file_without_one(name: str) -> None:
    config = RELEASED[name]
    if config.get("architectures") and config.get("model_type"):
        untyped = {field: value for field, value in config.items() if field != "model_type"}
        expected = "deepseek_v3" if config["model_type"] == "kimi_k2" else config["model_type"]
        assert type_of(untyped) == expected, "one architecture has two types, which are read alike"


@pytest.mark.parametrize("outer", sorted(name for name, wrapper in WRAPPERS.items() if wrapper.decoder))
def test_a_wrapper_whose_decoder_stands_outside_of_it_says_what_is_missing(outer: str) -> None:
    wrapper = WRAPPERS[outer]
    if wrapper.flat:
        return
    inner = whole(wrapper.decoder) | {"model_type": outer}
    with pytest.raises(ConfigError, match="stand outside") as refused:
        read_model(inner)
    assert refused.value.argument == wrapper.keys[0]
