"""A live LMCache 0.5.6 under observation: what it answers is judged, and a defect planted in it is found."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hkv.oracle.attach.attach import AttachSettings, CallError, Session, attach_all, judge_stores

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.lmcache]  # what torch and LMCache say

SHAPE = (2, 2, 16, 4, 8)
CHUNK = 16


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An engine that keeps chunks in the memory of the CPU, and moves no bytes."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    import torch
    from lmcache.v1.cache_engine import LMCacheEngineBuilder
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.gpu_connector.mock_gpu_connector import MockGPUConnector
    from lmcache.v1.metadata import LMCacheMetadata

    metadata = LMCacheMetadata("model", 1, 1, 0, 0, torch.float16, SHAPE)
    config = LMCacheEngineConfig.from_defaults(chunk_size=CHUNK, local_cpu=True, max_local_cpu_size=0.05)
    connector = MockGPUConnector(SHAPE)
    made = LMCacheEngineBuilder.get_or_create("hkv", config, metadata, connector, lambda t, s: t, lambda o, s: o)
    made.post_init()
    loop = made.storage_manager.loop
    yield made
    LMCacheEngineBuilder.destroy("hkv")
    loop.close()  # LMCache ends the thread that runs it, and leaves it open


def traffic(engine: Any, seed: int, calls: int = 40) -> None:
    """Requests that share prefixes are looked up, retrieved and stored; now and then some are removed."""
    import torch

    choices = random.Random(seed)
    texts = [[choices.randrange(5) for _ in range(200)] for _ in range(2)]
    for _ in range(calls):
        tokens = choices.choice(texts)[: choices.randrange(1, 120)] + [choices.randrange(5) for _ in range(20)]
        hit = engine.lookup(tokens)
        given = torch.tensor(tokens)
        mask = torch.ones(len(tokens), dtype=torch.bool)
        mask[: choices.choice((0, hit)) // CHUNK * CHUNK] = False
        moved = {"slot_mapping": torch.arange(len(tokens)), "kvcaches": []}
        if choices.random() < 0.7:
            engine.retrieve(given, mask, **moved)
        engine.store(given, mask=mask, **moved)
        if choices.random() < 0.1:
            engine.clear(tokens if choices.random() < 0.5 else None)


def judged(folder: Any) -> dict[str, Any]:
    (path,) = folder.glob("*-lmcache.json")
    return json.loads(path.read_text())


def test_every_call_is_as_the_oracle_says(engine: Any, tmp_path: Any) -> None:
    session = attach_all(str(tmp_path))
    for seed in range(3):
        traffic(engine, seed)
    session.close()
    found = judged(tmp_path)
    assert found["difference"] is None
    least = {"lookup": 100, "retrieve": 60, "process_tokens": 300, "chunks after a store": 60, "key of a prefix": 1000}
    assert {call: found["judged"][call] >= count for call, count in least.items()} == dict.fromkeys(least, True)


def test_functions_of_the_server_are_judged(tmp_path: Any) -> None:
    from lmcache.lmcache_native import Bitmap
    from lmcache.v1.distributed import bitmap_ops
    from lmcache.v1.distributed.api import ObjectKey
    from lmcache.v1.multiprocess import group_view, object_group_transfer, token_hasher

    session = attach_all(str(tmp_path))
    hasher = token_hasher.TokenHasher(4, "blake3")
    assert len(hasher.compute_chunk_hashes(list(range(30)), start=4, end=12)) == 2
    rows = [Bitmap(5), Bitmap(5)]
    for row, chunks in zip(rows, ((0, 1, 2, 3), (2, 3)), strict=True):
        for chunk in chunks:
            row.set(chunk)
    assert bitmap_ops.fold_unfold_grouped(rows, [-1, 2])[0] == 4
    ObjectKey.ComputeKVRank(8, 5, 4, 1)
    with pytest.raises(ValueError, match="does not align"):
        group_view.slice_block_ids_per_group({0: [1, 2, 3]}, [4], 3, 8)
    group_view.expand_engine_block_ids([], [[1, 2]])
    object_group_transfer.recalculate_blocks_to_skip(4, 2, 5)
    session.close()
    found = judged(tmp_path)
    assert found["difference"] is None
    assert set(found["judged"]) == {
        "compute_chunk_hashes",
        "fold_unfold_grouped",
        "ComputeKVRank",
        "slice_block_ids_per_group",
        "expand_engine_block_ids",
        "recalculate_blocks_to_skip",
    }
    assert not hasattr(bitmap_ops.fold_unfold_grouped, "__wrapped__")


def one_chunk_more(engine: Any) -> None:
    plain = engine.storage_manager.batched_contains

    def contains(keys: Any, *rest: Any) -> Any:
        hit, mapping = plain(keys, *rest)
        return min(hit + 1, len(keys)), mapping

    engine.storage_manager.batched_contains = contains


def keys_of_two_tokens(engine: Any) -> None:
    def hashed(tokens: Any, prefix_hash: Any = None, extra_keys: Any = None) -> int:
        return hash((prefix_hash, tuple(int(token) for token in tokens[:2])))

    engine.token_database._hash_tokens = hashed


def holes_are_retrieved(engine: Any) -> None:
    plain = engine.storage_manager.get_block_mapping
    engine.storage_manager.get_block_mapping = lambda infos: {
        name: blocks[:-1] for name, blocks in plain(infos).items()
    }


@pytest.mark.parametrize(
    ("defect", "call"),
    [(one_chunk_more, "lookup"), (keys_of_two_tokens, "prefix of a key"), (holes_are_retrieved, "retrieve")],
)
def test_a_defect_is_found(engine: Any, tmp_path: Any, defect: Callable[[Any], None], call: str) -> None:
    session = Session(AttachSettings(folder=str(tmp_path), on_difference="raise"))
    (judge,) = judge_stores(session)
    defect(engine)
    with pytest.raises(CallError, match=f"^lmcache: {call} of "):
        traffic(engine, 0)
    session.close()
    assert judged(tmp_path)["difference"]["call"] == call
    assert judge.difference is not None
