"""Vectors are valid, the same everywhere, and true by what is known without the code that made them."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import re
import subprocess
import sys

import cbor2
import jsonschema
import pytest
from click.testing import CliRunner

from hkv.cli.vectors import command
from hkv.keys.chained import KeyChain, event_hash, sha256_cbor
from hkv.layout.block_layout import Layout
from hkv.oracle.vectors import FAMILIES, VERSION, schema
from hkv.spec.written import spec_of

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    made = tmp_path_factory.mktemp("vectors")
    done = CliRunner().invoke(command, [str(made)])
    assert done.exit_code == 0, done.output
    assert "keys.json" in done.output
    return made


def cases(folder: pathlib.Path, family: str) -> list[dict]:
    return json.loads((folder / f"{family}.json").read_text())["cases"]


@pytest.mark.parametrize("family", FAMILIES)
def test_files_are_as_the_schema_says(folder: pathlib.Path, family: str) -> None:
    validator = jsonschema.Draft202012Validator(json.loads(schema()))
    document = json.loads((folder / f"{family}.json").read_text())
    validator.validate(document)
    assert document["vectors"] == VERSION
    assert len(document["cases"]) >= 16
    names = [case["name"] for case in document["cases"]]
    assert len(set(names)) == len(names)
    document["cases"][0]["expected"]["more"] = 1
    assert not validator.is_valid(document)
    del document["cases"][0]["input"]
    assert not validator.is_valid(document)


def test_they_are_the_same_in_another_process(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    environment = {**os.environ, "PYTHONHASHSEED": "12345", "PYTHONPATH": str(ROOT)}
    arguments = [sys.executable, "-m", "hkv", "vectors", str(tmp_path / "again"), "--json", "-"]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True, env=environment)
    index = json.loads((folder / "index.json").read_text())
    assert json.loads(done.stdout) == index
    for name, entry in index["files"].items():
        data = (folder / name).read_bytes()
        assert data == (tmp_path / "again" / name).read_bytes()
        assert hashlib.sha256(data).hexdigest() == entry["sha256"]
    assert (folder / "vectors.schema.json").read_bytes() == schema()


def test_keys_by_hand(folder: pathlib.Path) -> None:
    plain = [
        case for case in cases(folder, "keys") if not case["input"]["extra"] and not case["input"]["hash_lookahead"]
    ]
    assert len(plain) > 10
    for case in plain:
        given, expected = case["input"], case["expected"]
        key = hashlib.sha256(cbor2.dumps("vllm-none-hash", canonical=True)).digest()
        assert expected["root"] == key.hex()
        size = given["hash_block_size"]
        for index in range(len(given["tokens"]) // size):
            value = [key, given["tokens"][index * size : (index + 1) * size], None]
            key = hashlib.sha256(cbor2.dumps(value, canonical=True)).digest()
            assert expected["keys"][index] == key.hex()
            assert int(expected["event_hashes"][index]) == int.from_bytes(key[-8:], "big")
            assert expected["keys_of_group_1"][index] == key.hex() + "00000001"
        assert len(expected["keys"]) == len(given["tokens"]) // size


def test_hits_are_aligned_and_by_definition(folder: pathlib.Path) -> None:
    found = cases(folder, "hits")
    assert sum(case["expected"]["hit"] > 0 for case in found) > 60
    for case in found:
        expected = case["expected"]
        assert expected["hit"] % expected["alignment"] == 0
        assert expected["hit"] < case["input"]["num_tokens"]
        if not expected["may_differ"]:
            assert expected["hit"] == expected["by_definition"]


def test_the_pool_keeps_count(folder: pathlib.Path) -> None:
    operations = set()
    for case in cases(folder, "pool"):
        free = list(range(1, case["input"]["num_blocks"]))
        for operation, after in zip(case["input"]["operations"], case["expected"]["after"], strict=True):
            operations.add(operation["op"])
            if operation["op"] == "take":
                assert after["blocks"] == free[: operation["count"]]
            free = after["free"]
            assert sorted(free) == [block for block in range(1, len(after["refs"])) if after["refs"][block] == 0]
    assert operations == {"take", "release", "touch", "register", "evict", "reset"}


def test_addresses_are_those_of_the_strides(folder: pathlib.Path) -> None:
    strides = {case["name"]: case for case in cases(folder, "strides")}
    for case in cases(folder, "addresses"):
        given = case["input"]
        layout = Layout.of_spec(
            spec_of(given["spec"]),
            given["order"],
            num_blocks=given["num_blocks"],
            num_layers=given["num_layers"],
            kernel_block_size=given["kernel_block_size"],
        )
        expected = strides[case["name"]]["expected"]
        assert list(layout.strides) == expected["strides"]
        for element, address in zip(given["elements"], case["expected"]["addresses"], strict=True):
            place = layout.locate(address)
            assert place is not None
            assert (place.layer, place.block, place.state) == (element["layer"], element["block"], element["state"])


def test_the_document_names_every_file() -> None:
    text = (ROOT / "docs" / "command-line.md").read_text()
    assert set(re.findall(r"^\| `(\w+)\.json`", text, re.MULTILINE)) == set(FAMILIES)


def test_the_recipe_of_the_key_bytes_gives_what_its_page_says() -> None:
    page = (pathlib.Path(__file__).parents[2] / "docs" / "command-line.md").read_text()
    root = hashlib.sha256(bytes.fromhex("6e766c6c6d2d6e6f6e652d68617368")).digest()
    first = hashlib.sha256(cbor2.dumps([root, [1, 2], None], canonical=True)).digest()
    chain = KeyChain(sha256_cbor, 2)
    chain.extend([1, 2, 3, 4])
    assert chain.keys[0] == first
    for value in (root, cbor2.dumps([root, [1, 2], None], canonical=True), *chain.keys):
        assert f"`{value.hex()}`" in page
    assert f"| {event_hash(chain.keys[1])} |" in page
