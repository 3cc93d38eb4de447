"""Released models: every shipped config is whole, says where it is from, and is found by its names."""

from __future__ import annotations

import json
import pathlib

import pytest
from click.testing import CliRunner

import hkv
import hkv.model.released
from benchmarks import released_tables
from benchmarks.third_calculator import compared, outcome, recorded
from hkv.cli import cli
from hkv.errors import ConfigError, FileError, SpecError
from hkv.model.huggingface import ReadOptions, load_config, read_model
from hkv.model.released import Released, find, near, released_models
from tests.scripts import load_script

FOLDER = pathlib.Path(hkv.model.released.__file__).parent
MODELS = released_models()


def test_index_and_folder_name_the_same_models() -> None:
    assert {model.name for model in MODELS} == {path.stem for path in (FOLDER / "configs").iterdir()}
    assert len(MODELS) > 100


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_a_model_is_found_by_each_of_its_names(model: Released) -> None:
    assert model.name == model.name.lower()
    for name in (model.name, model.name.upper(), *model.ids, *(name.partition("/")[2] for name in model.ids)):
        assert find(name) is model
    assert load_config(model.ids[0]) == model.config()


def test_no_name_is_of_two_models() -> None:
    names = [name for model in MODELS for name in model.names]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_a_model_says_where_it_is_from(model: Released) -> None:
    assert all(name.count("/") == 1 for name in model.ids)
    assert all(source.startswith("https://") for source in (model.source, *model.compared))
    assert model.source not in model.compared


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_a_model_is_planned_or_refused_by_name(model: Released) -> None:
    refusal = None
    try:
        assert read_model(model.config(), ReadOptions()).specs
    except (ConfigError, SpecError) as error:
        refusal = error
    assert refusal is None or (refusal.argument and refusal.expected)


def test_a_file_comes_before_a_name(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / MODELS[0].name).mkdir()
    (tmp_path / MODELS[0].name / "config.json").write_text(json.dumps({"model_type": "mine"}))
    assert load_config(MODELS[0].name) == {"model_type": "mine"}


def test_an_unknown_name_is_refused_with_names_like_it() -> None:
    with pytest.raises(FileError, match="released model, such as gpt-oss-120b"):
        load_config("gpt-oss-125b")
    assert near("gpt-oss-125b")[0] == "gpt-oss-120b"
    with pytest.raises(FileError, match="no such file"):
        load_config("/nowhere/of/any/config.json")


def test_the_beginning_of_names_gives_them_all() -> None:
    assert near("Gemma-3") == ["gemma-3-12b", "gemma-3-1b", "gemma-3-27b", "gemma-3-4b"]
    assert near("google/gemma-3") == near("gemma-3")
    assert near("qwen3-next") == ["qwen3-next-80b-a3b"]
    assert len(near("q")) == 6


def test_names_go_wherever_configs_go(tmp_path: pathlib.Path) -> None:
    trace, out = tmp_path / "trace.jsonl", tmp_path / "out.json"
    runner = CliRunner()
    made = ["trace", "chat", "--requests", "5", "--seed", "1", "-o", str(trace)]
    replayed = ["replay", str(trace), "--model", "openai/gpt-oss-20b", "--memory", "20GiB", "--engine", "numpy"]
    for line in (made, [*replayed, "--json", str(out)]):
        assert runner.invoke(cli, line).exit_code == 0
    assert len(json.loads(out.read_text())["groups"]) == 2, "windows and full attention"
    assert hkv.read_model("gpt-oss-20b") == read_model(load_config("gpt-oss-20b"), ReadOptions())


# Bytes that another calculator gives released models: HKV's, or different for a reason that is counted.


COMPARED = compared()


def test_most_of_its_models_are_compared() -> None:
    assert len(COMPARED) >= 45
    assert sum(reason == "" for reason in COMPARED.values()) >= 35


@pytest.mark.parametrize("name", sorted(COMPARED))
def test_every_difference_has_a_reason(name: str) -> None:
    assert COMPARED[name] is not None


def test_a_difference_of_another_size_has_none() -> None:
    model = find("deepseek-v3.2")
    assert model is not None
    answer, read = recorded()["deepseek-v3.2"], read_model(model.config())
    assert outcome(answer, read, model)
    for change in ({"token_bytes": answer["token_bytes"] - 4}, {"formula": "mla"}):
        assert outcome(answer | change, read, model) is None


# The documents say what the code says.


ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


def test_the_document_of_released_models_is_current() -> None:
    written = (ROOT / "docs" / "tables" / "released-models.md").read_text(encoding="utf-8")
    assert written == released_tables.document(), "run: python benchmarks/released_tables.py"


def test_the_document_of_models_is_current() -> None:
    module = load_script(ROOT / "benchmarks" / "model_tables.py")
    written = (ROOT / "docs" / "tables" / "models.md").read_text(encoding="utf-8")
    assert written == module.document(), "run: python benchmarks/model_tables.py"
