"""Prefixes that went to chunk objects come back byte for byte, in another cache, and say the same."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import hkv
from hkv import serving
from hkv.cache.arrivals import ArrivalResult
from hkv.dialects.vllm.offload.config import OffloadConfig
from hkv.errors import ConfigError, LayoutError, OperationError
from hkv.keys.blake3 import kv_rank
from hkv.keys.fingerprint import ROOT
from hkv.model.topology import Group
from hkv.serving.objects import chunk_objects
from hkv.serving.tiers import _names, _tables, _unpack
from hkv.tier.disk import DiskTier
from hkv.tier.tier import MemoryTier
from tests.cache.build import large_copies
from tests.serving.test_serving import LONGEST, PROMPTS, Host, R, check, config
from tests.test_documents import MESH, run_page

PROMPT = PROMPTS[1]


def offload(**changes) -> serving.Offload:
    return dataclasses.replace(serving.Offload(MemoryTier(1 << 20), "a model"), **changes)


def served(prompt=PROMPT, new=8) -> tuple[Host, list[int]]:
    """A host whose row 0 has computed a prompt and what follows, and its tokens."""
    host = Host()
    host.arrive(0, prompt, len(prompt) + new)
    host.run()
    return host, host.tokens(0)


def arrive(cache: serving.Serving, tokens, root=None) -> tuple[serving.Serving, ArrivalResult]:
    padded = np.zeros((1, LONGEST), np.int32)
    padded[0, : len(tokens)] = tokens
    return serving.arrive(
        cache, np.array([0]), padded, np.array([len(tokens)]), None if root is None else np.array([root], np.uint32)
    )


def pages(cache: serving.Serving, layer: str) -> dict[str, np.ndarray]:
    """A layer's pages of row 0, block by block."""
    found = serving.gather(cache, layer, 0)
    blocks = cache.cache.tables.shape[2]
    return {part: np.asarray(array).reshape(blocks, -1) for part, array in found.items()}


@pytest.mark.parametrize("order", ["LBNHC", "BLHNC"])
def test_every_byte_comes_back_into_a_cache_of_any_order(order):
    host, tokens = served()
    places = offload()
    assert serving.store(host.served, places, 0, tokens) > 0
    assert serving.store(host.served, places, 0, tokens) == 0
    fresh = serving.from_config(config(), rows=R, order=order)
    fresh, loaded = serving.load(fresh, places, tokens)
    computed = int(host.served.cache.computed[0])
    assert loaded == computed // 4 * 4
    assert int(fresh.cache.free_blocks) == config().num_blocks - 1
    fresh, found = arrive(fresh, [*tokens[:loaded], 3])
    assert found.hits.tolist() == [loaded]
    for layer in ("full", "near", "nearer", "state"):
        group = fresh.layer(layer).group
        held = np.asarray(fresh.cache.tables[0, group])[: loaded // 4] != 0
        assert held.any()
        mine, theirs = pages(fresh, layer), pages(host.served, layer)
        for part in mine:
            np.testing.assert_array_equal(mine[part][: loaded // 4][held], theirs[part][: loaded // 4][held])
            assert mine[part][: loaded // 4][held].any()


def test_another_process_goes_on_from_the_disk(tmp_path):
    """The same greedy tokens with a hit, which NumPy finds without a cache."""
    host, tokens = served(new=1)
    with DiskTier(tmp_path, 1 << 20) as disk:
        serving.store(host.served, offload(tier=disk), 0, tokens)
    _, tokens = served()
    other = Host()
    with DiskTier(tmp_path, 1 << 20) as disk:
        other.served, loaded = serving.load(other.served, offload(tier=disk), PROMPT)
    assert loaded == 20
    assert other.arrive(0, PROMPT, len(tokens)) == 20
    other.run()
    assert other.tokens(0) == tokens
    check(tokens, len(PROMPT))


def test_a_lost_object_shortens_the_prefix(tmp_path):
    """Without its last state, a prefix ends at the state before."""
    host = Host()
    places = offload(tier=DiskTier(tmp_path, 1 << 20))
    for end in (8, 16, 20):
        host.arrive(0, PROMPT[:end], end + 1)
        host.run()
        serving.store(host.served, places, 0, PROMPT[:end])
        host.leave(0)
    assert serving.load(Host().served, places, PROMPT)[1] == 20
    for path in sorted(tmp_path.glob("*.safetensors"))[:1]:
        path.write_bytes(path.read_bytes()[:-1])
    _, shorter = serving.load(Host().served, places, PROMPT)
    assert 0 <= shorter < 20


def test_what_is_there_already_is_not_read_again():
    host, tokens = served()
    places = offload()
    serving.store(host.served, places, 0, tokens)
    host.leave(0)
    before = np.asarray(host.served.pool)
    for key in places.tier.keys:
        places.tier.store(key, np.full_like(places.tier.retrieve(key), 7))
    host.served, loaded = serving.load(host.served, places, tokens)
    assert loaded == 28
    np.testing.assert_array_equal(host.served.pool, before)


def test_objects_of_others_are_not_found():
    host, tokens = served()
    places = offload()
    serving.store(host.served, places, 0, tokens)
    different = [
        ({"model": "another"}, None),
        ({"rank": kv_rank(2, 1, 2, 1)}, None),
        ({"chunk": 8}, None),
        ({}, (1, 2, 3, 4)),
    ]
    for changes, root in different:
        rest = {} if root is None else {"root": root}
        assert serving.load(Host().served, dataclasses.replace(places, **changes), tokens, **rest)[1] == 0
    assert serving.load(Host().served, places, [1, *tokens[1:]])[1] == 0


def test_too_few_free_blocks_take_nothing():
    host, tokens = served()
    places = offload()
    serving.store(host.served, places, 0, tokens)
    small = serving.from_config(config(8), rows=R)
    before = [np.asarray(leaf) for leaf in small.cache.state.__dict__.values()]
    small, loaded = serving.load(small, places, tokens)
    assert loaded == 0
    for leaf, old in zip(small.cache.state.__dict__.values(), before, strict=True):
        np.testing.assert_array_equal(leaf, old)


def test_misuse_is_named():
    host, tokens = served()
    with pytest.raises(OperationError, match="tokens = '28 tokens': expected those computed in row 0"):
        serving.store(host.served, offload(), 0, [tokens[0] + 1, *tokens[1:]])
    with pytest.raises(OperationError, match="tokens"):
        serving.store(host.served, offload(), 0, tokens, root=(1, 2, 3, 4))
    with pytest.raises(OperationError, match="row = 3: expected a row from 0 to 2"):
        serving.store(host.served, offload(), R, tokens)
    with pytest.raises(LayoutError, match="chunk = 6: expected a multiple of the block's 4 tokens"):
        serving.store(host.served, offload(chunk=6), 0, tokens)
    places = offload()
    serving.store(host.served, places, 0, tokens)
    for key in places.tier.keys:
        places.tier.store(key, np.zeros(3, np.uint8))
    with pytest.raises(OperationError, match="tier"):
        serving.load(Host().served, places, tokens)
    full = hkv.FullAttention(block_size=4, num_kv_heads=1, head_size=8, dtype="float32")
    groups = hkv.Topology(groups=(Group(tag="full", spec=full, layers=("full",)),))
    with pytest.raises(ConfigError, match="caching"):
        serving.load(
            serving.from_config(hkv.cache_config(groups, 9, max_model_len=32, caching=False), rows=1), places, tokens
        )


def test_the_pool_is_written_in_place():
    cache = Host().served
    for entry in chunk_objects(cache).entries:
        objects = jnp.zeros((4, entry.layout.nbytes), jnp.uint8)
        tables = _tables(entry, [0, 1], lambda group, column: 1 + column)
        text = _unpack.lower(cache.pool, entry, objects, tables).compile().as_text()
        copied = large_copies(text, cache.pool.size)
        assert [line for line in copied if " scatter(" not in line] == []


def windows(**changes):
    """Blocks of two sizes, and a window of three of the smaller ones."""
    full = hkv.FullAttention(block_size=8, num_kv_heads=1, head_size=8, dtype="float32")
    window = hkv.SlidingWindow(block_size=4, num_kv_heads=2, head_size=4, dtype="bfloat16", window=11)
    groups = (Group(tag="f", spec=full, layers=("f",)), Group(tag="w", spec=window, layers=("w", "v")))
    return dataclasses.replace(hkv.cache_config(hkv.Topology(groups=groups), 40, max_model_len=LONGEST), **changes)


@pytest.mark.parametrize(
    ("chunk", "eagle", "of_full", "of_window", "window"),
    [(8, False, 1, 2, 2), (16, False, 2, 3, 1), (16, True, 2, 4, -1)],
)
def test_an_object_has_the_end_of_a_window_that_is_shorter_than_a_chunk(chunk, eagle, of_full, of_window, window):
    made = serving.from_config(windows(eagle=bool(eagle)), rows=R)
    found = chunk_objects(made, chunk)
    assert [entry.members[0].kept for entry in found.entries] == [of_full, of_window]
    assert [entry.window for entry in found.entries] == [-1, window]
    assert found.entries[1].layout.nbytes == 2 * 2 * of_window * 4 * 2 * 4 * 2


# vLLM's rules.


def native(made: hkv.VllmConfig | None = None, **changes) -> serving.Offload:
    rules = OffloadConfig(cache=config() if made is None else made, num_chunks=99)
    return dataclasses.replace(offload(rules=rules), **changes)


def test_under_vllms_rules_every_byte_comes_back_and_arrive_finds_it():
    host, tokens = served(new=1)
    places = native()
    assert serving.store(host.served, places, 0, tokens) > 0
    assert serving.store(host.served, places, 0, tokens) == 0
    assert serving.load(serving.from_config(config(), rows=R), offload(tier=places.tier), tokens)[1] == 0
    fresh, loaded = serving.load(serving.from_config(config(), rows=R), places, PROMPT)
    assert loaded == (len(PROMPT) - 1) // 4 * 4
    fresh, found = arrive(fresh, PROMPT)
    assert found.hits.tolist() == [loaded]
    for layer in ("full", "near", "nearer", "state"):
        held = np.asarray(fresh.cache.tables[0, fresh.layer(layer).group])[: loaded // 4] != 0
        mine, theirs = pages(fresh, layer), pages(host.served, layer)
        for part in mine:
            np.testing.assert_array_equal(mine[part][: loaded // 4][held], theirs[part][: loaded // 4][held])
            assert mine[part][: loaded // 4][held].any()


def test_under_vllms_rules_nothing_is_read_of_what_the_cache_hits():
    host = Host()
    places = native()
    for end in (9, len(PROMPT)):
        host.arrive(0, PROMPT[:end], end + 1)
        host.run()
        serving.store(host.served, places, 0, PROMPT[:end])
        host.leave(0)
    other, loaded = serving.load(Host().served, places, PROMPT[:9])
    assert loaded == 8
    for key in places.tier.keys:
        data = np.asarray(places.tier.retrieve(key))
        if data.nbytes == 2 * 4 * 8 * 4 and key in names(other, places, PROMPT[:9]):
            places.tier.store(key, np.full_like(data, 7))
    other, loaded = serving.load(other, places, PROMPT)
    assert loaded == (len(PROMPT) - 1) // 4 * 4
    other, found = arrive(other, PROMPT)
    assert found.hits.tolist() == [loaded]
    host.arrive(0, PROMPT, len(PROMPT) + 1)
    for part, array in pages(other, "full").items():
        np.testing.assert_array_equal(array[: loaded // 4], pages(host.served, "full")[part][: loaded // 4])


def names(made: serving.Serving, places: serving.Offload, tokens) -> set[bytes]:
    """Names of the objects of full attention."""
    return set(_names(places, places.objects(made), tokens, ROOT)[0])


def test_rules_of_another_cache_or_beyond_prompts_are_refused():
    host, tokens = served(new=1)
    with pytest.raises(ConfigError, match=r"rules = \[8, 4\]: expected blocks of \[4, 4, 4\]"):
        serving.store(host.served, native(windows()), 0, tokens)
    rules = dataclasses.replace(native().rules, prompt_only=False)
    with pytest.raises(ConfigError, match=r"rules\.prompt_only = False: expected True"):
        serving.store(host.served, native(rules=rules), 0, tokens)
    with pytest.raises(ConfigError, match="chunk = 8: expected None beside rules"):
        serving.load(host.served, native(chunk=8), tokens)


def test_the_code_of_the_page_runs() -> None:
    """`docs/serving.md` serves with hits, in debug mode, through a tier and for a kernel."""
    run_page("serving", until=MESH)
