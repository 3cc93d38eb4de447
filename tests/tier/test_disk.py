"""The disk tier: what is stored comes back, what is damaged never does, and a kill anywhere costs misses only."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hkv.errors import FileError, OperationError
from hkv.tier.disk import DiskTier


def bytes_of(text: str, size: int = 1000) -> np.ndarray:
    return np.frombuffer((text * size).encode()[:size], np.uint8)


def test_an_object_and_its_metadata_survive_a_restart(tmp_path):
    with DiskTier(tmp_path, 100_000) as tier:
        assert tier.store(b"k1", bytes_of("abc"), {"layout": "LBHNC"})
    with DiskTier(tmp_path, 100_000) as tier:
        stored = tier.retrieve(b"k1")
        assert stored is not None
        assert np.array_equal(stored.data, bytes_of("abc"))
        assert stored.metadata == {"layout": "LBHNC"}
        assert tier.retrieve(b"k2") is None
        assert tier.incidents == []


def test_the_order_of_use_survives_a_restart(tmp_path):
    with DiskTier(tmp_path, 100_000) as tier:
        for name in (b"a", b"b", b"c"):
            tier.store(name, bytes_of("x"))
            os.utime(tmp_path / f"{name.hex()}.safetensors", ns=(1, name[0]))
        tier.retrieve(b"a")
    with DiskTier(tmp_path, 100_000) as tier:
        assert tier.keys == (b"b", b"c", b"a")


def test_the_least_recently_used_goes_first_and_pins_hold(tmp_path):
    with DiskTier(tmp_path, 4_500) as tier:
        for name in (b"a", b"b", b"c"):
            assert tier.store(name, bytes_of("x"))
        assert tier.pin(b"a")
        assert tier.store(b"d", bytes_of("y"))
        assert tier.keys == (b"a", b"c", b"d")
        assert not tier.store(b"a", bytes_of("z")), "a pinned object must not be replaced"
        assert not tier.store(b"e", bytes_of("z", 4_000)), "it cannot fit beside the pinned one"
        assert tier.keys == (b"a", b"c", b"d")
        with pytest.raises(OperationError, match="without pins"):
            tier.evict(b"a")
        tier.unpin(b"a")
        with pytest.raises(OperationError, match="pinned"):
            tier.unpin(b"a")
        assert tier.store(b"e", bytes_of("z", 4_000))
        assert tier.keys == (b"e",)


def test_a_smaller_capacity_evicts_on_opening(tmp_path):
    with DiskTier(tmp_path, 100_000) as tier:
        for index, name in enumerate((b"a", b"b", b"c")):
            tier.store(name, bytes_of("x"))
            os.utime(tmp_path / f"{name.hex()}.safetensors", ns=(index + 1, index + 1))
    with DiskTier(tmp_path, 3_000) as tier:
        assert tier.keys == (b"b", b"c")
    assert not (tmp_path / f"{b'a'.hex()}.safetensors").exists()


@given(position=st.integers(0, 10**6), flip=st.integers(1, 255))
def test_a_flipped_byte_is_never_returned_as_data(tmp_path_factory, position, flip):
    folder = tmp_path_factory.mktemp("tier")
    with DiskTier(folder, 100_000) as tier:
        tier.store(b"key", bytes_of("abc", 300), {"a": "b"})
        path = folder / f"{b'key'.hex()}.safetensors"
        content = bytearray(path.read_bytes())
        content[position % len(content)] ^= flip
        path.write_bytes(content)
        stored = tier.retrieve(b"key")
        if stored is None:
            assert [incident.name for incident in tier.incidents] == [path.name]
            assert tier.incidents[0].quarantined.exists()
            assert b"key" not in tier
        else:
            # Only padding of the file's header can change without consequence.
            assert np.array_equal(stored.data, bytes_of("abc", 300))
            assert stored.metadata == {"a": "b"}


@given(keep=st.integers(0, 400))
def test_a_truncated_file_is_a_miss(tmp_path_factory, keep):
    folder = tmp_path_factory.mktemp("tier")
    with DiskTier(folder, 100_000) as tier:
        tier.store(b"key", bytes_of("abc", 300))
        path = folder / f"{b'key'.hex()}.safetensors"
        path.write_bytes(path.read_bytes()[:keep])
        assert tier.retrieve(b"key") is None
        assert len(tier.incidents) == 1
        assert tier.store(b"key", bytes_of("abc", 300))
        assert tier.retrieve(b"key") is not None


def test_an_object_under_another_name_is_a_miss(tmp_path):
    with DiskTier(tmp_path, 100_000) as tier:
        tier.store(b"a", bytes_of("a"))
        tier.store(b"b", bytes_of("b"))
        os.replace(tmp_path / f"{b'a'.hex()}.safetensors", tmp_path / f"{b'b'.hex()}.safetensors")
        assert tier.retrieve(b"b") is None
        assert tier.retrieve(b"a") is None
        assert [incident.reason.split(":")[0] for incident in tier.incidents] == ["not this object", "unreadable"]


def test_foreign_files_are_put_away_and_quarantine_is_bounded(tmp_path):
    (tmp_path / "12-1.partial").write_bytes(b"x" * 3_000)
    (tmp_path / "zz.safetensors").write_bytes(b"x" * 3_000)
    with DiskTier(tmp_path, 4_000) as tier:
        assert sorted(incident.reason for incident in tier.incidents) == ["half-written", "not a chunk object"]
        assert len(list(tier.quarantine.iterdir())) == 1
        assert tier.store(b"a", bytes_of("a", 2_000))
        assert list(tier.quarantine.iterdir()) == []


def test_two_processes_cannot_have_one_folder(tmp_path):
    with DiskTier(tmp_path, 1_000), pytest.raises(FileError, match="no other process"):
        DiskTier(tmp_path, 1_000)


@pytest.mark.parametrize(
    ("key", "data", "match"),
    [
        (b"", np.zeros(1, np.uint8), "key"),
        (b"k" * 101, np.zeros(1, np.uint8), "key"),
        (b"k", np.zeros((1, 1), np.uint8), "data"),
        (b"k", np.zeros(1, np.int8), "data"),
    ],
)
def test_bad_arguments_are_refused(tmp_path, key, data, match):
    with DiskTier(tmp_path, 1_000) as tier:
        with pytest.raises(OperationError, match=match):
            tier.store(key, data)
        assert len(tier) == 0


def test_a_kill_at_any_call_returns_nothing_wrong(tmp_path):
    driver = pathlib.Path(__file__).with_name("kill_driver.py")
    output = subprocess.run([sys.executable, driver, tmp_path], capture_output=True, text=True, check=True).stdout
    result = json.loads(output)
    assert result["wrong"] == []
    assert result["kills"] >= 200
    assert result["hits"] >= 200
    assert result["incidents"] >= 50, "the kills must leave half-written files"
