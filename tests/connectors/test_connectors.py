"""Connectors held to the plan: the plan's bytes are those of a walk, right ones pass, planted mistakes are named."""

from __future__ import annotations

import json
import pathlib
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterable

import pytest

from hkv import processes
from hkv.connectors.__main__ import HEADER, main
from hkv.connectors.cases import ENGINES, PACKED, SMALL, all_cases
from hkv.connectors.check import CheckReport, _finding, check_connector
from hkv.connectors.memory import Memory, Range, merged, without
from hkv.connectors.mistakes import MISTAKES, Connector
from hkv.errors import ConfigError, HKVError, LayoutError
from hkv.layout.content import quantize
from hkv.layout.orders import Order
from hkv.spec import FullAttention, LayerSpec
from reference.layout import cell_addresses
from tests.scripts import load_script

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


def first_line(report: CheckReport) -> str:
    return report.describe().splitlines()[0]


def test_the_data_of_a_block_are_the_bytes_of_a_walk() -> None:
    """In every order, whole and in kernel blocks: `reference/layout.py` finds them with a cursor, without strides."""
    packed = FullAttention(block_size=4, num_kv_heads=3, head_size=16, dtype="bfloat16")
    specs: dict[str, LayerSpec] = SMALL | {name: quantize(packed, name) for name in PACKED}
    seen = 0
    for case in all_cases(["vllm"]):
        name, _, form = case.name.partition(", ")
        if name == "one head":  # and the comma of "one head, padded"
            name, form = "one head, padded", form.partition(", ")[2]
        if name not in specs:
            continue
        order, _, kernel = form.partition(", kernel blocks of ")
        (group,), layers = case.memory.groups, len(case.memory.layers)
        piece = int(kernel.split()[0]) if kernel else None
        walked = cell_addresses(specs[name], order, layers, group.num_blocks, offset=256, kernel_block_size=piece)
        for layer, block in case.asks():
            mine = {byte for (at, of, *_), byte in walked.items() if (at, of) == (layer, block)}
            given = {byte for each in case.data(layer, block) for byte in range(each.first, each.first + each.size)}
            assert given == mine, case.name
        seen += 1
    assert seen > 60


def test_every_form_is_asked_for() -> None:
    names = [case.name for case in all_cases()]
    assert len(set(names)) == len(names)
    for order in Order:
        assert sum(order.value in name for name in names) >= 15
    for engine, least in zip(ENGINES, (150, 7, 18), strict=True):
        assert len(all_cases([engine])) >= least
    memories = [case.memory for case in all_cases()]
    assert any(max(memory.buffers) > 1 << 32 for memory in memories)
    assert any(len({layer.page_bytes for layer in memory.layers}) > 1 for memory in memories)
    with pytest.raises(LayoutError, match="engine = 'sglang': expected one of vllm, rtp-llm, lmcache"):
        all_cases(["sglang"])


def test_a_right_connector_passes() -> None:
    report = check_connector(f"{EXAMPLES / 'connector.py'}:block_ranges")
    assert not report.wrong
    assert first_line(report) == f"right: {report.blocks} blocks of {report.cases} forms of memory asked for"
    assert report.blocks > 1500


def planted(connector: Connector) -> Connector:
    """The mistake where it can be made, the right bytes elsewhere."""

    def function(memory: Memory, layer: int, block: int) -> Iterable[Range]:
        try:
            return list(connector(memory, layer, block))
        except (HKVError, ValueError, IndexError):
            return memory.block(layer, block)

    return function


@pytest.mark.parametrize(("text", "connector"), MISTAKES, ids=[text for text, _ in MISTAKES])
def test_a_planted_mistake_is_named_in_the_first_line(text: str, connector: Connector) -> None:
    report = check_connector(planted(connector))
    assert first_line(report) == f"wrong: {text}"
    assert report.wrong[0].case.name in report.describe()


def test_what_is_no_known_mistake_is_told_by_whose_the_bytes_are() -> None:
    def one_too_many(memory: Memory, layer: int, block: int) -> Iterable[Range]:
        return [Range(at, first, size + 1) for at, first, size in memory.block(layer, block)]

    def nothing_of_one(memory: Memory, layer: int, block: int) -> Iterable[Range]:
        return memory.block(layer, block)[: 0 if block == 2 else None]

    def twice(memory: Memory, layer: int, block: int) -> Iterable[Range]:
        return [*memory.block(layer, block)] * 2

    def raising(memory: Memory, layer: int, block: int) -> Iterable[Range]:
        raise KeyError(memory.layers[layer].name)

    lines = [first_line(check_connector(each, ["vllm"])) for each in (one_too_many, nothing_of_one, twice, raising)]
    assert lines[0].startswith("wrong: 1 byte too many, the first of them block 1 of layer layers.0")
    assert lines[1].startswith("wrong: 264 bytes left out, the first of them block 2 of layer layers.0")
    assert lines[2].startswith("wrong: bytes are given twice, from byte 256 of buffer 0 on")
    assert lines[3] == "wrong: the connector raised KeyError: 'layers.0'"


def last_part_first(memory: Memory, layer: int, block: int) -> Iterable[Range]:
    return memory.block(layer, block)[::-1]


def test_keys_and_values_or_states_that_are_exchanged_are_told() -> None:
    """As a set the bytes are right: their order is what tells."""
    report = check_connector(last_part_first, ["lmcache"])
    assert first_line(report) == (
        "wrong: value bytes come before key bytes: whoever loads them by another layout has them exchanged"
    )
    assert len(report.wrong) == sum(len(case.memory.block(0, 0)) > 1 for case in all_cases(["lmcache"])) == 12

    def states(memory: Memory, layer: int, block: int) -> Iterable[Range]:
        (one,) = memory.block(layer, block)
        return [Range(one.buffer, one.first + 12, one.size - 12), Range(one.buffer, one.first, 12)]  # conv: 2 x 3 x 2

    case = next(case for case in all_cases(["vllm"]) if case.name == f"states, {next(iter(Order)).value}")
    found = _finding(case, [(*ask, tuple(states(case.memory, *ask))) for ask in case.asks()])
    assert found is not None
    assert found.mistake.startswith("state1 bytes come before state0 bytes")


def test_blocks_of_which_one_comes_in_another_order_are_told() -> None:
    """Stored of the one and loaded into the other, keys become values, or one head another."""

    def heads(memory: Memory, layer: int, block: int) -> Iterable[Range]:
        found = memory.block(layer, block)
        return found[::-1] if block == 2 and len(memory.layers[layer].tensors) == 1 else found

    report = check_connector(heads, ["vllm"])
    assert first_line(report).startswith("wrong: bytes of block 2 come in another order than those of block 0")
    assert all("LHBNC" in each.case.name or "BHLNC" in each.case.name for each in report.wrong)

    def finely(memory: Memory, layer: int, block: int) -> Iterable[Range]:  # cut anywhere, in the same order
        return [Range(at, first + cut, 1) for at, first, size in memory.block(layer, block) for cut in range(size)]

    small = [case for case in all_cases() if max(case.memory.buffers) < 1 << 14]
    assert len(small) > 100
    assert all(not _finding(case, [(*ask, tuple(finely(case.memory, *ask))) for ask in case.asks()]) for case in small)


def test_a_connector_that_knows_the_blocks_of_group_0_alone_is_found() -> None:
    def clamped(memory: Memory, layer: int, block: int) -> Iterable[Range]:
        return memory.block(layer, min(block, memory.groups[0].num_blocks - 1))

    report = check_connector(clamped)
    assert {each.case.name.partition(",")[0] for each in report.wrong} == {"LMCache's chunks of 64 tokens"}


def test_a_connector_may_warn(recwarn: pytest.WarningsRecorder) -> None:
    """Under filters that make errors of warnings, as this suite has, those of others stay warnings."""

    def warning(memory: Memory, layer: int, block: int) -> Iterable[Range]:
        warnings.warn_explicit("old", DeprecationWarning, "torch/__init__.py", 1, module="torch")
        return memory.block(layer, block)

    assert not check_connector(warning, ["lmcache"]).wrong
    assert recwarn


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "ended by SIGKILL"),
        ("time.sleep(600)", "did not return within 0.5 s"),
        ("raise Own('no', 1)", "raised Own: ('no', 1)"),
    ],
)
def test_a_named_function_cannot_take_the_command_with_it(tmp_path: pathlib.Path, body: str, told: str) -> None:
    target = tmp_path / "bad.py"
    lines = ("import os, signal, time", "class Own(Exception): pass", "def ranges(memory, layer, block):")
    target.write_text("\n".join((*lines, f"    if block == 2: {body}", "    return memory.block(layer, block)")))
    report = check_connector(f"{target}:ranges", ["lmcache"], seconds=0.5)
    assert first_line(report) == f"wrong: the connector {told}"
    assert bool(report.left) == ("Own" not in body)
    assert report.left == 0 or f"{report.left} not asked any more" in report.describe()


def test_a_named_function_cannot_take_all_memory(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "MEMORY", 1 << 29)
    target = tmp_path / "greedy.py"
    target.write_text("def ranges(memory, layer, block):\n    held = b'x' * (1 << 30)\n    while held: pass\n")
    report = check_connector(f"{target}:ranges", ["lmcache"])
    assert first_line(report) == "wrong: the connector took more than 512 MiB of memory"
    assert report.left


def test_what_a_connector_does_not_have_is_counted_and_not_asked_for() -> None:
    def only_latents(memory: Memory, layer: int, block: int) -> Iterable[Range]:
        if any("K" in tensor.axes or "H" in tensor.axes for tensor in memory.layers[layer].tensors):
            raise NotImplementedError
        return memory.block(layer, block)

    report = check_connector(only_latents)
    assert (report.wrong, report.cases) == ((), 1)
    assert f"{len(report.unsupported)} forms not supported" in first_line(report)
    assert len(report.unsupported) == len(all_cases()) - 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("connector", "expected one of MODULE:FUNCTION"),
        ("no.such:function", "a module that can be imported"),
        (f"{EXAMPLES / 'connector.py'}:nothing", "a class or function nothing"),
        ("no_such.so:function", "there is no file no_such.so"),
        (f"{EXAMPLES / 'connector.c'}.so:function", "there is no file"),
    ],
)
def test_functions_that_are_not_there_are_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_connector(name)


def test_answers_that_are_no_ranges_are_refused() -> None:
    with pytest.raises(ConfigError, match="connector = 5: expected ranges, each a buffer"):
        check_connector(lambda memory, layer, block: [5])  # type: ignore[list-item,return-value]


def test_ranges_of_nothing_are_left_out() -> None:
    """A range without bytes inside another one is no byte given twice."""

    def with_nothing(memory: Memory, layer: int, block: int) -> Iterable[Range]:
        found = memory.block(layer, block)
        return [Range(found[0].buffer, found[0].first + 1, 0), *found]

    assert not check_connector(with_nothing).wrong


def test_a_mistake_is_named_only_where_every_wrong_answer_is_explained() -> None:
    """One answer was raised: what the others look like is not all that is wrong."""

    def function(memory: Memory, layer: int, block: int) -> Iterable[Range]:
        if block == 0:
            raise KeyError(block)
        return memory.block(layer, block - 1)

    report = check_connector(function, ["lmcache"])
    assert first_line(report) == "wrong: the connector raised KeyError: 0"
    assert not any(each.mistakes for each in report.wrong)


def test_a_connector_in_c(tmp_path: pathlib.Path) -> None:
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("no gcc to build the connector in C with")
    library = tmp_path / "connector.so"
    flags = ["-std=c11", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-I", str(HEADER.parent)]
    subprocess.run([compiler, *flags, "-o", str(library), str(EXAMPLES / "connector.c")], check=True)
    report = check_connector(f"{library}:block_ranges")
    assert first_line(report) == first_line(check_connector(f"{EXAMPLES / 'connector.py'}:block_ranges"))
    assert first_line(check_connector(f"{library}:narrow_ranges")) == "wrong: addresses are cut to 32 bits"
    with pytest.raises(ConfigError, match="a symbol other in "):
        check_connector(f"{library}:other")
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"no library")
    with pytest.raises(ConfigError, match="a shared library that can be loaded"):
        check_connector(f"{broken}:block_ranges")


def test_the_command_without_packages(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, written = f"{EXAMPLES / 'connector.py'}:only_group_0", tmp_path / "ranges.json"
    assert main([target, "--engine", "lmcache"]) == 1
    assert capsys.readouterr().out.startswith("wrong: group 0's size of a block is used for every group\n")
    assert main([target, "--engine", "lmcache", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["wrong"][0]["given"] == [[0, 1536, 384]]
    assert main(["--vectors", str(written), "--header"]) == 0
    assert len(json.loads(written.read_text())["cases"]) == len(all_cases())
    assert "int64_t FUNCTION(" in pathlib.Path(capsys.readouterr().out.strip()).read_text()
    assert main(["nothing"]) == 2
    assert "error: connector = 'nothing'" in capsys.readouterr().err


def test_the_wheel_of_the_layouts_wants_numpy_alone() -> None:
    """Each of its modules is imported where no other package can be."""
    chosen = load_script(ROOT / ".ci" / "hkv-layouts" / "chosen_files.py")
    names = [name.removesuffix(".py").replace("/", ".") for name in chosen.chosen_files() if name.endswith(".py")]
    code = (
        "import importlib, sys\n"
        "own = {'hkv', 'numpy', *sys.stdlib_module_names}\n"
        "class Others:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] not in own and not name.startswith('_'):\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Others())\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name.removesuffix('.__init__'))\n"
    )
    subprocess.run([sys.executable, "-c", code, *names], check=True, cwd=ROOT)
    assert "hkv.connectors.check" in names
    assert not any(name.startswith(("hkv.cache", "hkv.oracle", "hkv.cli")) for name in names)


def test_ranges() -> None:
    some = (Range(0, 8, 4), Range(0, 0, 8), Range(1, 12, 4))
    assert merged(some) == (Range(0, 0, 12), Range(1, 12, 4))
    assert list(without(some, [Range(0, 2, 3), Range(0, 9, 1)])) == [
        *(Range(0, 0, 2), Range(0, 5, 3), Range(0, 8, 1), Range(0, 10, 2)),
        Range(1, 12, 4),
    ]
