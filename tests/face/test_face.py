"""Public names of `import hkv`: loaded when used, never shadowed by a submodule, and every name works."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import pathlib
import pkgutil
import re
import subprocess
import sys
import types
import typing

import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner

import hkv
import hkv.testing
from hkv import chunks, mesh, rtp_llm, serving, views
from hkv.cli import cli
from hkv.errors import ConfigError, OperationError

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
LOG = ROOT / "tests" / "data" / "oplogs"
MODEL = ROOT / "tests" / "data" / "models" / "gemma3_text.json"
SPECS = [
    hkv.FullAttention(block_size=4),
    hkv.SlidingWindow(block_size=4, window=6),
    hkv.ChunkedLocal(block_size=4, chunk=8),
    hkv.MLAAttention(block_size=4),
    hkv.Mamba(block_size=4),
    hkv.OpaqueState(block_size=4),
]
TEXT, PLACES = 30, 8
"""Tokens that are given to one row, and to a step: one size for all tests, which share their programs so."""
TRACE = [{"timestamp": 40 * i, "input_length": 900, "output_length": 9, "hash_ids": [0, 1 + i % 3]} for i in range(12)]


def test_importing_is_light() -> None:
    heavy = ("jax", "jaxlib", "numpy", "click", "chex")
    code = f"import sys, hkv, hkv.testing.plugin; print(sorted(set({heavy}) & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize("module", [hkv, hkv.testing])
def test_names_are_there(module) -> None:
    assert set(module.__all__) <= set(dir(module))
    for name in module.__all__:
        assert inspect.getdoc(getattr(module, name)), name
    with pytest.raises(AttributeError, match="nothing"):
        _ = module.nothing


def test_types_and_places_agree() -> None:
    """The imports for type checkers name what is loaded."""
    imported = re.findall(r"^    from (\S+) import (.+)$", (ROOT / "hkv" / "__init__.py").read_text(), re.MULTILINE)
    homes = {name: module for module, names in imported for name in names.split(", ") if name != "testing"}
    loaded = {name: module for module, names in hkv._MODULES.items() for name in names.split() if name != "testing"}
    assert homes == loaded
    assert sorted(homes) == sorted(set(hkv.__all__) - {"testing"})


def test_no_verb_takes_anything() -> None:
    for name in set(hkv.__all__) - {"testing"}:
        value = getattr(hkv, name)
        if inspect.isclass(value):
            continue
        parameters = inspect.signature(value).parameters.values()
        kinds = {parameter.kind for parameter in parameters}
        assert not kinds & {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}, name
        hints = {parameter.annotation for parameter in parameters}
        assert not hints & {inspect.Parameter.empty, typing.Any, "Any"}, name


def small_cache() -> hkv.Cache:
    """Two groups and twelve blocks for two rows."""
    config = hkv.cache_config(hkv.Topology.of_specs(SPECS[:2]), 13, max_model_len=32)
    return hkv.init(config, rows=2, row_blocks=8)


@pytest.fixture
def trace(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(request) + "\n" for request in TRACE))
    return path


def test_every_name_works_with_every_submodule_imported(trace: pathlib.Path) -> None:
    submodules = [
        module.name for module in pkgutil.walk_packages(hkv.__path__, "hkv.") if "__main__" not in module.name
    ]
    for name in submodules:
        with contextlib.suppress(ImportError, hkv.HKVError):  # of an extra that is not installed
            importlib.import_module(name)
    called = set(hkv.__all__) - {"testing", "HKVError", "Cache"}

    for spec in SPECS:
        assert hkv.Layout.of_spec(spec, "LBHNC", num_blocks=3).num_blocks == 3
    cache = small_cache()
    assert isinstance(cache, hkv.Cache)
    cache, found = hkv.arrive(cache, jnp.array([0]), jnp.ones((1, 8), jnp.int32), jnp.array([8]))
    cache, _ = hkv.step(cache, jnp.ones(PLACES, jnp.int32), jnp.array([0, 8, 8]))
    assert cache.computed.tolist() == [8, 0]
    assert found.hits.tolist() == [0]
    assert hkv.longest_hit(cache, jnp.ones(9, jnp.int32)).length == 8
    cache, given = hkv.allocate(cache, 1, jnp.ones(TEXT, jnp.int32), 9)
    assert given.hit == 8
    cache, status = hkv.finish(cache, jnp.array([0]))
    cache, last = hkv.free(cache, 1)
    assert [*status.tolist(), int(last)] == [0, 0]
    assert cache.free_blocks == 12

    model = hkv.read_model(MODEL)
    assert hkv.plan(model, "8GiB").requests >= 1
    log = next(LOG.glob("core*.jsonl"))
    assert hkv.check(log).agrees
    assert hkv.explain(log, 2 + next(_lookups(log))).hit >= 0
    assert hkv.record("core", 3, "numpy", steps=2).log.operations
    assert hkv.diff("numpy", features=["core"], seeds=1, steps=2).agrees
    assert len(hkv.replay_trace(trace, SPECS[:2], 2000, engine="numpy").requests["hit"]) == len(TRACE)
    names = {"write", "gather", "scatter", "copy_blocks", "zero_blocks"}
    _pages(SPECS[0])
    used = set(re.findall(r"hkv\.(\w+)\b", inspect.getsource(sys.modules[__name__])))
    assert called - names <= used
    assert callable(hkv.testing.run_watched)


def _lookups(log: pathlib.Path):
    lines = log.read_text().splitlines()[1:]
    return (number for number, line in enumerate(lines) if json.loads(line)["op"] == "lookup")


def _pages(spec) -> None:
    layout = hkv.Layout.of_spec(spec, "LBHNC", num_blocks=4)
    pool = jnp.zeros(layout.end, jnp.uint8)
    part = layout.content[0]
    value = jnp.ones((1, layout.shape[2], *part.shape), part.dtype)
    pool, missed = hkv.write(pool, layout, 0, jnp.array([1]), jnp.array([2]), {part.name: value})
    pool, _ = hkv.copy_blocks(pool, layout, jnp.array([1]), jnp.array([2]))
    found, _ = hkv.gather(pool, layout, 0, jnp.array([2]))
    pool, _ = hkv.zero_blocks(pool, layout, jnp.array([1, 2]))
    assert not pool.any()
    pool, _ = hkv.scatter(pool, layout, 0, jnp.array([3]), found)
    again, _ = hkv.gather(pool, layout, 0, jnp.array([3]))
    np.testing.assert_array_equal(np.asarray(again[part.name][2], np.float32), np.asarray(value[0], np.float32))
    assert missed == 0
    with pytest.raises(hkv.HKVError, match="states"):
        hkv.write(pool, layout, 0, jnp.array([1]), jnp.array([1, 2]), {part.name: value})


def test_arrays_that_do_not_fit_are_refused_by_name() -> None:
    cache = small_cache()
    ones, ends = jnp.ones((PLACES, 1), jnp.int32), jnp.arange(3)
    counts = ones[:, 0]
    for arguments, name in (
        ((ones, ends), "tokens"),
        ((counts.astype(jnp.float32), ends), "tokens"),
        ((counts, ends[:1]), "cu_q_lens"),
        ((counts, jnp.arange(4)), "cu_q_lens"),
        ((counts[:0], ends), "cu_q_lens"),
        ((counts, ends, counts[:1]), "rows"),
        ((counts, ends, None, ones), "drafts"),
    ):
        with pytest.raises(OperationError) as raised:
            hkv.step(cache, *arguments)
        assert raised.value.argument == name
    with pytest.raises(OperationError, match=r"row = .*float32"):
        hkv.allocate(cache, jnp.float32(1), counts)
    with pytest.raises(OperationError, match="roots"):
        hkv.arrive(cache, counts, ones, counts, ones)
    for call in (
        lambda: hkv.longest_hit(cache, counts[:0]),
        lambda: hkv.allocate(cache, 0, counts[:0]),
        lambda: hkv.arrive(cache, counts[:1], ones[:1, :0], counts[:1]),
    ):
        with pytest.raises(OperationError, match=r"tokens = 'int32\[.*0\]': expected at least one"):
            call()
    for call in (lambda: hkv.arrive(cache, counts[:0], ones[:0], counts[:0]), lambda: hkv.finish(cache, counts[:0])):
        with pytest.raises(OperationError, match=r"rows = 'int32\[0\]': expected at least one"):
            call()
    hkv.step(cache, counts, ends)  # nothing was donated by the refusals


def test_a_refused_request_takes_nothing() -> None:
    cache, text = small_cache(), jnp.arange(TEXT)
    cache, first = hkv.allocate(cache, 0, text, 17)
    before = [np.asarray(leaf) for leaf in (cache.tables, cache.computed, cache.running, cache.free_blocks)]
    missing = hkv.Status.NO_SUCH_SLOT
    for row, count, status in ((1, 30, hkv.Status.NO_ROOM), (5, 3, missing), (-1, 3, missing)):
        cache, refused = hkv.allocate(cache, row, text, count)
        assert first.status == hkv.Status.OK
        assert hkv.Status(int(refused.status)) is status
        assert (refused.blocks == -1).all()
        after = [np.asarray(leaf) for leaf in (cache.tables, cache.computed, cache.running, cache.free_blocks)]
        assert all((a == b).all() for a, b in zip(before, after, strict=True))
    cache, again = hkv.allocate(cache, 1, text, 18)
    assert (int(again.status), int(again.hit)) == (0, 16)


def command(*arguments: object) -> dict:
    done = CliRunner().invoke(cli, [*map(str, arguments), "--json", "-"])
    assert done.exit_code in (0, 1), done.output
    return json.loads(done.stdout)


def test_commands_and_calls_give_the_same_numbers(trace: pathlib.Path, tmp_path: pathlib.Path) -> None:
    logs = sorted(LOG.glob("core*.jsonl"))[:2]
    said, found = command("check", *logs, "--coverage"), hkv.check(logs, coverage=True)
    assert said["operations"] == found.operations == sum(found.logs["operations"])
    assert [log["path"] for log in said["logs"]] == found.logs["path"].tolist()
    assert {rule: sum(c.values()) for rule, c in said["coverage"].items()} == dict(
        zip(found.coverage["rule"].tolist(), found.coverage["times"].tolist(), strict=True)
    )

    wrong = f"{ROOT / 'examples' / 'wrong_engine.py'}:WrongEngine"
    asked = ("--kinds", "full_attention", "--max-groups", 1, "--version", 1, "--seeds", 4, "--feature", "core")
    said = command("diff", "--engines", f"{wrong},numpy", *asked)
    result = hkv.diff(wrong, features=["core"], seeds=4, kinds=["full_attention"], max_groups=1, version=1)
    assert said["operations"] == result.operations
    assert said["differences"] == {found.feature: json.loads(json.dumps(found.record())) for found in result.found}
    assert result.differences["invariant"].tolist() == ["index"]

    path = tmp_path / "log.jsonl"
    said = command("record", "--engine", "numpy", "--feature", "partial", "--seed", 7, "--steps", 6, "-o", path)
    recorded = hkv.record("partial", 7, "numpy", steps=6)
    assert path.read_bytes() == recorded.content
    assert (said["operations"], said["rules"]) == (len(recorded.log.operations), recorded.rules)

    line = 2 + next(_lookups(logs[0]))
    said, story = command("explain", logs[0], "--line", line), hkv.explain(logs[0], line)
    assert (said["hit"], said["request"], said["line"]) == (story.hit, story.request, story.line)

    said, planned = command("plan", MODEL, "--memory", "8GiB"), hkv.plan(hkv.read_model(MODEL), "8GiB")
    assert said == json.loads(json.dumps(planned.report()))
    assert [group["block_size"] for group in said["groups"]] == planned.groups["block_size"].tolist()
    assert len(planned.layouts()) == sum(planned.tensors["layers"])

    groups = ("--groups", "full:16,swa:16:64", "--num-blocks", 300, "--engine", "numpy")
    said = command("replay", trace, *groups)
    specs = [hkv.FullAttention(block_size=16), hkv.SlidingWindow(block_size=16, window=64)]
    replayed = hkv.replay_trace(trace, specs, 300, engine="numpy")
    for table in ("requests", "steps", "occupancy"):
        assert said[table] == {name: column.tolist() for name, column in getattr(replayed, table).items()}
    del said["totals"]["seconds"]
    assert said["totals"] == {name: value for name, value in replayed.totals.items() if name != "seconds"}
    for index, group in enumerate(said["groups"]):
        assert group["reasons"] == {reason: replayed.groups[reason][index] for reason in group["reasons"]}


def test_sweep_and_compare_say_what_the_commands_say(trace: pathlib.Path, tmp_path: pathlib.Path) -> None:
    specs = [hkv.FullAttention(block_size=16), hkv.SlidingWindow(block_size=16, window=64)]
    groups = ("--groups", "full:16,swa:16:64", "--engine", "numpy", "--jobs", 1)
    sizes = ("--num-blocks", "150;300;600", "--retention", "dense,0")
    said = [row for line in command("sweep", trace, *groups, *sizes, "--bounds")["lines"] for row in line["points"]]
    vary = {"retention": [None, 0], "num_blocks": [150, 300, 600]}
    swept = hkv.sweep(trace, vary, {"groups": specs}, engine="numpy", bounds=True)
    for name in ("hit_tokens", "evictions", "optimal_tokens", "hit_rate"):
        assert sorted(swept.points[name].tolist()) == sorted(row[name] for row in said)
    assert swept.points["num_blocks"].tolist() == ["150", "300", "600"] * 2
    assert swept.lines["line"].tolist() == ["retention None", "retention 0"]
    assert (swept.lines["infinite"] >= swept.lines["highest"]).all()

    saved = tmp_path / "large.json"
    command_line = ["replay", trace, *groups[:4], "--num-blocks", 600, "--json", saved]
    assert CliRunner().invoke(cli, [str(word) for word in command_line], catch_exceptions=False).exit_code == 0
    small = hkv.replay_trace(trace, specs, 150, engine="numpy")
    result = hkv.compare({"small": small, "large": saved})
    said = command("compare", trace, *groups, "--num-blocks", "150;600")
    for table in ("totals", "causes"):
        mine = {name: column.tolist() for name, column in getattr(result, table).items()}
        assert mine | {"replay": ""} == said[table] | {"replay": ""}
    assert result.changes[0].gained == said["changes"][0]["gained"] > 0

    for wrong in ({"retention": [0]}, {"num_blocks": [150], "nothing": [1]}, {"num_blocks": [150], "check": [True]}):
        with pytest.raises(ConfigError):
            hkv.sweep(trace, wrong, {"groups": specs}, engine="numpy")


def test_replay_says_what_it_cannot_use(trace: pathlib.Path) -> None:
    specs = [hkv.FullAttention(block_size=16)]
    with pytest.raises(ConfigError, match="dialect_options"):
        hkv.replay_trace(trace, specs, 300, dialect_options={"nothing": 1})
    with pytest.raises(ConfigError, match="num-blocks"):
        hkv.replay_trace(trace, specs)
    rtp = hkv.replay_trace(trace, specs, 300, engine="numpy", dialect="rtp-llm/single")
    assert rtp.totals["finished"] == len(TRACE)


def test_columns_are_of_one_length(trace: pathlib.Path) -> None:
    planned = hkv.plan(hkv.read_model(MODEL), "8GiB")
    replayed = hkv.replay_trace(trace, [hkv.FullAttention(block_size=16)], 300, engine="numpy")
    checked = hkv.check(next(LOG.glob("core*.jsonl")), coverage=True)
    swept = hkv.sweep(trace, {"num_blocks": [300, 400]}, {"groups": [hkv.FullAttention(block_size=16)]}, engine="numpy")
    compared = hkv.compare({"one": replayed, "other": replayed})
    tables = [planned.groups, planned.tensors, replayed.requests, replayed.steps, replayed.groups, swept.points]
    tables += [swept.lines, compared.totals, compared.causes, compared.requests]
    for table in [*tables, checked.logs, checked.coverage, hkv.diff("numpy", features=["core"], seeds=1).differences]:
        assert len({len(column) for column in table.values()}) == 1
        assert all(isinstance(column, np.ndarray) and column.ndim == 1 for column in table.values())


# The parts beside the face, by the names under which `docs/api.md` has them: `hkv.views`, `hkv.mesh`, ...

SPEC = hkv.FullAttention(block_size=4, num_kv_heads=2, head_size=8)


@pytest.mark.parametrize("part", [chunks, mesh, rtp_llm, views])
def test_names_of_a_part_are_there(part: types.ModuleType) -> None:
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
    assert chunks.longest_prefix([chunks.ChunkRow.of({0, 1})], 3).hit == 2


def test_rtp_llms_pools() -> None:
    layers = (rtp_llm.LayerDescription(caches=(rtp_llm.CacheDescription(tag="full", spec=SPEC),)),)
    model, options = rtp_llm.DescribedModel(layers), rtp_llm.RtpOptions(block_size=4)
    cache = rtp_llm.PlannedCache.of_layers(model, options, num_blocks=3)
    assert rtp_llm.zero(rtp_llm.on_device(cache), cache, "full", jnp.array([2]))[1] == 0


def test_parts_are_written_down() -> None:
    page = hkv.__doc__ or ""
    assert all(f"`{part.__name__}`" in page for part in (chunks, mesh, rtp_llm, serving, views, hkv.testing))
