"""The parts beside the face, by the names under which `docs/library.md` has them: `hkv.views`, `hkv.mesh`, ..."""

from __future__ import annotations

import pkgutil
import types

import jax.numpy as jnp
import numpy as np
import pytest

import hkv
from hkv import chunks, mesh, rtp_llm, serving, views

SPEC = hkv.FullAttention(block_size=4, num_kv_heads=2, head_size=8)


@pytest.mark.parametrize("part", [chunks, mesh, rtp_llm, views])
def test_names_are_there(part: types.ModuleType) -> None:
    submodules = {each.name for each in pkgutil.iter_modules(getattr(part, "__path__", ()))}
    for name in part.__all__:
        assert name.isupper() or getattr(part, name).__doc__, name
    assert not submodules & set(part.__all__)
    with pytest.raises(AttributeError, match="nothing"):
        _ = part.nothing


def test_views_show_the_same_bytes() -> None:
    layer = hkv.Layout.of_spec(SPEC, "LBHNC", num_blocks=3, num_layers=2).layer_view(1)
    pool = np.arange(layer.end, dtype=np.uint8)
    found = views.jax.read_blocks(jnp.asarray(pool), layer, jnp.arange(3))
    assert (np.asarray(found).view(np.uint8) == views.numpy.view(pool, layer).view(np.uint8)).all()


def test_pools_on_a_mesh() -> None:
    shape = mesh.ParallelShape(heads=2)
    layout = hkv.Layout.of_spec(SPEC, "LBHNC", num_blocks=4)
    cache = mesh.ShardedLayout(mesh.make_mesh(shape), shape, layout)
    plan = mesh.plan_resharding(*(mesh.Side(shape=shape, layout=layout, row=row) for row in ((1,), (3,))), range(4))
    pool = cache.zeros(layout.end // 4).at[...].set(7)
    moved = mesh.execute(plan, pool, cache, cache.zeros(layout.end // 4), cache)
    assert moved.reshape(4, -1).any(axis=1).tolist() == [False, False, False, True]


def test_chunks_of_a_cache() -> None:
    infos = (chunks.EngineGroupInfo(0, (0,), 16),)
    formats, seen = chunks.discover_per_layer_formats([chunks.TensorView((5, 16, 2, 64))], "vllm", chunks.Hints("NHD"))
    groups = chunks.group_layers(formats, seen, infos)
    (objects,) = chunks.object_groups(groups, chunk=32)
    (launch,) = chunks.plan_transfer(groups, objects, [[3, 1]], 32, "store", [True])
    assert launch.block_ids == (3, 1)
    assert chunks.longest_prefix([chunks.Row.of({0, 1})], 3).hit == 2


def test_rtp_llms_pools() -> None:
    layers = (rtp_llm.LayerDescription(caches=(rtp_llm.CacheDescription(tag="full", spec=SPEC),)),)
    model, options = rtp_llm.DescribedModel(layers), rtp_llm.RtpOptions(block_size=4)
    cache = rtp_llm.PlannedCache.of_layers(model, options, num_blocks=3)
    assert rtp_llm.zero(rtp_llm.on_device(cache), cache, "full", jnp.array([2]))[1] == 0


def test_parts_are_written_down() -> None:
    page = hkv.__doc__ or ""
    assert all(f"`{part.__name__}`" in page for part in (chunks, mesh, rtp_llm, serving, views, hkv.testing))
