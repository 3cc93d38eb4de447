"""Chained keys against values recorded from vLLM 0.33.0, and dense numbers for keys."""

from __future__ import annotations

import builtins
import subprocess
import sys

import pytest

from hkv.errors import ConfigError, HKVError, MissingExtraError, OperationError
from hkv.keys.chained import (
    DIGESTS,
    Interner,
    KeyChain,
    PrefixIdentity,
    block_key,
    digest_by_name,
    event_hash,
    extra_keys,
    group_key,
    root_key,
)

ADAPTER = (("lora", "n", "/p"), ("mm", "img", -2), ("cache_salt", "s"))
SALT = (("cache_salt", "s"),)

GOLDEN = {
    "sha256": {
        "root": "066b1e8987e027138e98701c46128929378935f9b6cd1549105ae6b4f0d71198",
        "first": "9da1c53089c000ad1a79a77c143b68dda00e2a85315bc1f690bbd03ba4a195dd",
        "child": "1c9b6c0620e875631f1c5395ed56f2243aa113f88fc842f04fbb0654074b8d43",
        "salt": "6132bd860ee9893a960cf21f7dfbb108cc80a23efdac7fa2acbd795bc1a9ffcd",
        "adapter": "0d8560f832f2dc8539942316d43fc91bcbe31a8488b7b0b8e9685792a69632fb",
        "lookahead": "9037ddb8bc597d6e73801cb0765d56afdcf25a7765334ee3563a343729b362e8",
    },
    "sha256_cbor": {
        "root": "9bd96a485ad84efdafb72ee48a1d7a69bcead0f8f0433173941b276b9581eef0",
        "first": "c49ab11fb576db6f376aef58c24f728a0ba1807e8cac5f940f1a5c4c20741898",
        "child": "9d0a7c928c548f9aeea31ae98471cf515045a206851732ac14cb3083c18d40f9",
        "salt": "133f45b0653b06a987ebab68a95537b0e94b5986856599cd117752c96df80d39",
        "adapter": "c27df953862ea665c05180d650e31595254339e44f2e1df9637dd3c56b50960c",
        "lookahead": "f67434700ed135cf703562ef91c0821b52829b009be3e279122aa41d085ed1c6",
    },
}


@pytest.mark.parametrize("name", sorted(GOLDEN))
def test_keys_are_those_that_were_recorded(name):
    digest = digest_by_name(name)
    first = block_key(digest, None, (0, 1, 2, 3), None)
    assert {
        "root": root_key(digest).hex(),
        "first": first.hex(),
        "child": block_key(digest, first, (4, 5, 6, 7), None).hex(),
        "salt": block_key(digest, None, (0, 1, 2, 3), SALT).hex(),
        "adapter": block_key(digest, None, (0, 1, 2, 3), ADAPTER).hex(),
        "lookahead": block_key(digest, None, (0, 1, 2, 3), (None, 4)).hex(),
    } == GOLDEN[name]


def test_group_and_event_form_of_a_key():
    key = bytes.fromhex(GOLDEN["sha256_cbor"]["first"])
    assert group_key(key, 3) == key + bytes([0, 0, 0, 3])
    assert event_hash(key) == 1088283741995145368


def test_a_chain_grows_as_its_tokens_do():
    digest = digest_by_name("sha256_cbor")
    chain = KeyChain(digest, 4)
    chain.extend(range(3))
    assert chain.keys == []
    chain.extend(range(4))
    chain.extend(range(9))
    assert [key.hex() for key in chain.keys] == [GOLDEN["sha256_cbor"]["first"], GOLDEN["sha256_cbor"]["child"]]


def test_with_a_lookahead_a_key_waits_for_the_tokens_it_covers():
    digest = digest_by_name("sha256_cbor")
    chain = KeyChain(digest, 4, lookahead=1)
    chain.extend(range(4))
    assert chain.keys == []
    chain.extend(range(5))
    assert [key.hex() for key in chain.keys] == [GOLDEN["sha256_cbor"]["lookahead"]]
    wide = KeyChain(digest, 4, lookahead=2)
    wide.extend(range(6))
    assert wide.keys == [block_key(digest, None, range(4), (None, 4, 5))]


def test_every_part_of_an_identity_has_its_place():
    identity = PrefixIdentity(
        lora=("n", "/p"), multimodal=(("img", 2, 4), ("snd", 6, 2)), salt="s", embeds=(b"a", b"b", b"c", b"d", b"e")
    )
    lora = ("lora", "n", "/p")
    at_0 = extra_keys(identity, 0, 4)
    at_4 = extra_keys(identity, 4, 8)
    assert at_0 is not None
    assert at_4 is not None
    assert at_0[:3] == (lora, ("mm", "img", 2), ("cache_salt", "s"))
    assert at_4[:3] == (lora, ("mm", "img", -2), ("mm", "snd", 2))
    assert [part[0] for part in (at_0[-1], at_4[-1])] == ["prompt_embeds"] * 2
    assert at_0[-1] != at_4[-1]
    assert extra_keys(PrefixIdentity(salt=""), 0, 4) is None
    assert extra_keys(PrefixIdentity(multimodal=(("img", 4, 4),)), 0, 4) is None
    assert extra_keys(PrefixIdentity(multimodal=(("img", 0, 4),)), 4, 8) is None


@pytest.mark.parametrize(
    "identity",
    [
        PrefixIdentity(lora=("n", "/p")),
        PrefixIdentity(multimodal=(("img", 1, 2),)),
        PrefixIdentity(multimodal=(("img", 2, 2),)),
        PrefixIdentity(salt="s"),
        PrefixIdentity(embeds=(b"x",) * 8),
    ],
)
def test_what_identifies_a_prefix_changes_all_its_keys(identity):
    plain, other = (KeyChain(digest_by_name("sha256_cbor"), 4, 0, who) for who in (PrefixIdentity(), identity))
    for chain in (plain, other):
        chain.extend(range(8))
    assert all(a != b for a, b in zip(plain.keys, other.keys, strict=True))


@pytest.mark.parametrize("items", [(("a", 4, 2), ("b", 1, 1)), (("a", 0, 4), ("b", 3, 2)), (("a", 0, 0),)])
def test_items_out_of_order_are_refused(items):
    with pytest.raises(OperationError, match="multimodal"):
        PrefixIdentity(multimodal=items)


def test_hashes_of_16_bytes():
    pytest.importorskip("xxhash", reason="the chain hashes xxhash and xxhash_cbor need the package xxhash")
    keys = [block_key(digest_by_name(name), None, (1, 2), None) for name in ("xxhash", "xxhash_cbor")]
    assert [len(key) for key in keys] == [16, 16]
    assert keys[0] != keys[1]


def test_a_missing_package_is_named(monkeypatch):
    real = builtins.__import__

    def without(name, *rest):
        if name == "xxhash":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setitem(sys.modules, "xxhash", None)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtraError, match=r"hkv\[hashes\]"):
        DIGESTS["xxhash_cbor"]((1,))


def test_an_unknown_hash_is_named():
    with pytest.raises(ConfigError, match="md5"):
        digest_by_name("md5")
    assert issubclass(ConfigError, HKVError)


def test_importing_keys_imports_no_jax():
    code = "import sys, hkv.keys.chained; sys.exit('jax' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_numbers_are_dense_and_stay() -> None:
    interner = Interner()
    assert interner.numbers([b"a", b"b", b"c"]) == [0, 1, 2]
    assert interner.numbers([b"b", b"d"], 1) == [1, 3]
    assert interner.keys == [b"a", b"b", b"c", b"d"]
    assert interner.places == [0, 1, 2, 2]
    assert len(interner) == 4
    assert interner.find(b"d") == 3
    assert interner.find(b"x") is None
