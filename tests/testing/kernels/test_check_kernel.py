"""`hkv check-kernel` and its parts: right kernels pass, published byte bugs are found and named, nothing is guessed."""

from __future__ import annotations

import inspect
import itertools
import os
import pathlib
import re
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings

from hkv import processes
from hkv.chunks.formats import TRAITS, EngineKVFormat, num_tensors, page_index, tensor_index
from hkv.cli import cli
from hkv.contract.traffic import RandomChoices
from hkv.errors import ConfigError, FileError, LayoutError
from hkv.layout.block_layout import Layout
from hkv.layout.views.numpy import view
from hkv.spec import FullAttention
from hkv.testing import strategies
from hkv.testing.kernels import (
    assert_viewed_as,
    assert_writes_like,
    check,
    judge,
    kernel,
    place,
    repeat,
    target_of,
)
from hkv.testing.kernels.call import Call
from hkv.testing.kernels.cases import FEATURES, Case, Supports, features_of
from hkv.testing.kernels.definition import expected
from hkv.testing.kernels.drawing import draw_case
from hkv.testing.kernels.judge import read_case
from hkv.testing.kernels.memory import PAGE, Memory
from hkv.testing.kernels.mistakes import predictions
from hkv.testing.kernels.plans import left_by, plan_of, same
from hkv.testing.kernels.targets import Target
from tests.testing.kernels import right
from tests.testing.kernels.confused import WRITERS
from tests.testing.kernels.planted import PLANTED, tokens, write_slots

ROOT = pathlib.Path(__file__).parents[3]


@pytest.mark.parametrize("function", right.KERNELS, ids=lambda function: function.__name__)
def test_a_right_kernel_passes(function) -> None:
    draws = 60 if function is right.attention else 200
    verdict = check(target_of(function, function.__name__), draws)
    assert verdict.failure is None
    assert verdict.asked == draws


def test_published_byte_bugs_are_found_and_named() -> None:
    assert len(PLANTED) >= 30
    assert {planted.operation for planted in PLANTED.values()} >= {"write", "gather", "copy_blocks", "zero", "pack"}
    for name, planted in PLANTED.items():
        failure = check(target_of(planted.kernel, planted.operation, **planted.options)).failure
        assert failure is not None, name
        assert re.search(planted.says, failure.text.split("\n")[0]), f"{name}: {failure.text}"


@pytest.mark.parametrize("says", list(WRITERS))
def test_first_mistakes_are_named(says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "shrink", lambda target, finding, kind: finding)  # the name is what is asked here
    monkeypatch.setattr(judge, "FAILURES", 4)
    for writer in WRITERS[says]:
        failure = check(target_of(writer, "write")).failure
        assert failure is not None
        assert re.match(says, failure.text), failure.text


def test_the_layer_of_what_a_slot_holds_is_told() -> None:
    failure = check(target_of(PLANTED["layer_left_0"].kernel, "write")).failure
    assert failure is not None
    assert re.search(r"in layer 0 holds what belongs to .* in layer [12]\n", failure.text), failure.text


@pytest.mark.torch
@pytest.mark.parametrize("name", sorted(PLANTED))
def test_the_same_in_torch(name: str) -> None:
    planted = PLANTED[name]
    failure = check(target_of(planted.kernel, planted.operation, arrays="torch", **planted.options)).failure
    assert failure is not None
    assert re.search(planted.says, failure.text.split("\n")[0]), failure.text


@pytest.mark.torch
@pytest.mark.parametrize("function", right.KERNELS, ids=lambda function: function.__name__)
def test_a_right_kernel_passes_in_torch(function) -> None:
    lacks = ("far blocks",) if function is right.gather else ()
    assert check(target_of(function, function.__name__, arrays="torch", lacks=lacks), 60).failure is None


@pytest.mark.torch
def test_the_example_in_torch_is_right() -> None:
    verdict = check(target_of(f"{ROOT}/examples/kernels/torch_writer.py:write"), 150)
    assert verdict.failure is None
    assert set(verdict.features) >= {"float8_e4m3fn", "pool", "L2BNHD", "padding tokens", "split blocks"}


def test_jax_arrays_are_given_back() -> None:
    jnp = pytest.importorskip("jax.numpy")

    def write(key, value, key_cache, value_cache, slot_mapping):
        size = key_cache.shape[1]
        slots = jnp.where(slot_mapping < 0, len(key_cache) * size, slot_mapping)
        return [
            cache.at[slots // size, slots % size].set(new, mode="drop")
            for cache, new in ((key_cache, key), (value_cache, value))
        ]

    def unpadded(key, value, key_cache, value_cache, slot_mapping):
        size, slots = key_cache.shape[1], slot_mapping
        return [
            cache.at[slots // size, slots % size].set(new) for cache, new in ((key_cache, key), (value_cache, value))
        ]

    options = {"arrays": "jax", "dtypes": ("float32",), "head_sizes": (2,), "block_sizes": (2,), "heads": (2,)}
    verdict = check(target_of(write, "write", reuse=10, **options), 60)
    assert verdict.failure is None
    failure = check(target_of(unpadded, "write", reuse=10, **options), 60).failure
    assert failure is not None
    assert failure.kind.startswith("padding tokens")


# C.


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("library") / "c_writer.so"
    source = ROOT / "examples" / "kernels" / "c_writer.c"
    subprocess.run(["cc", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-o", path, source], check=True)
    return path


def test_a_c_function_is_called_in_a_process_of_its_own(library: pathlib.Path) -> None:
    verdict = check(target_of(f"{library}:write", "write"), 150)
    assert verdict.failure is None
    assert verdict.features["far blocks"] > 0
    failure = check(target_of(f"{library}:write_narrow", "write"), 400).failure
    assert failure is not None
    assert "only with far blocks" in failure.text.split("\n")[0]


FIRST_TRIES = {
    "first_tries.py:writes_to_a_copy": ("write", "nothing is written at all (was a copy changed?)"),
    "first_tries.py:takes_slot_0_for_padding": ("write", "padding tokens or blocks (-1) are not left out"),
    "first_tries.c:write": ("write", "the row stride of the inputs is ignored"),
    "first_tries.c:zero": ("zero", "ids of manager blocks are taken for kernel blocks"),
}


@pytest.mark.torch
@pytest.mark.parametrize("name", list(FIRST_TRIES))
def test_first_tries_are_told_what_is_wrong(name: str, tmp_path: pathlib.Path) -> None:
    place, _, function = name.partition(":")
    path, arrays = pathlib.Path(__file__).with_name(place), "torch" if place.endswith(".py") else ""
    if not arrays:
        source, path = path, tmp_path / "tries.so"
        subprocess.run(["cc", "-O2", "-Wall", "-Werror", "-shared", "-fPIC", "-o", path, source], check=True)
    operation, says = FIRST_TRIES[name]
    failure = check(target_of(f"{path}:{function}", operation, arrays=arrays)).failure
    assert failure is not None
    assert failure.text.startswith(says), failure.text


HUNG = "the kernel did not return within 0.5 s\ncase: write"
DIED = "memory outside of all arrays is touched, or worse: the kernel ended by SIGSEGV\ncase: write"
ENDLESS = {"./spin.so:write": HUNG, "spin.py:write": HUNG, "spin.py:native": HUNG, "spin.py:die": DIED}


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with kernels that never return, or end their process."""
    folder = tmp_path_factory.mktemp("endless")
    (folder / "spin.c").write_text("int write(void) { for (volatile int i = 0;; i++); }")
    (folder / "spin.py").write_text(
        "import ctypes, os\n"
        "def write(key, value, key_cache, value_cache, slot_mapping):\n    while len(slot_mapping) > 1: pass\n"
        "def native(key, value, key_cache, value_cache, slot_mapping):\n    ctypes.PyDLL('./spin.so').write()\n"
        "def die(key, value, key_cache, value_cache, slot_mapping):\n    ctypes.string_at(0)\n"
        "def leave(key, value, key_cache, value_cache, slot_mapping):\n    raise SystemExit(0)\n"
    )
    (folder / "abort.py").write_text("import os; os.abort()")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", "spin.so", "spin.c"], check=True, cwd=folder)
    return folder


@pytest.mark.parametrize("name", list(ENDLESS))
def test_a_function_that_never_returns_is_a_failure_of_the_case(endless: pathlib.Path, name: str) -> None:
    command = [sys.executable, "-m", "hkv", "check-kernel", name, "--operation", "write", "--timeout", "0.5"]
    told = subprocess.run(
        command, capture_output=True, text=True, cwd=endless, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert (told.returncode, told.stdout[: len(ENDLESS[name])]) == (1, ENDLESS[name]), told
    assert read_case((endless / "kernel-case.json").read_bytes(), "case").target == name


@pytest.mark.parametrize("name", list(ENDLESS))
def test_the_same_from_a_process_with_threads(
    endless: pathlib.Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("jax")  # whose threads a fork would lack; output is in memory, too
    monkeypatch.chdir(endless)
    told = CliRunner().invoke(cli, ["check-kernel", name, "--operation", "write", "--timeout", "0.5"])
    assert (told.exit_code, told.output[: len(ENDLESS[name])]) == (1, ENDLESS[name]), told
    again = CliRunner().invoke(cli, ["check-kernel", "--case", "kernel-case.json", "--timeout", "0.5"])
    assert (again.exit_code, again.output[: len(ENDLESS[name])]) == (1, ENDLESS[name]), again


def test_a_function_that_takes_all_memory_is_ended(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "MEMORY", 1 << 29)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "copies.py").write_text(
        "def write(key, value, key_cache, value_cache, slot_mapping):\n"
        "    held = b'x' * (1 << 30) if len(key_cache) > LEAST else b''\n    while held: pass\n"
        "LEAST = 0\n"
        "def write_far(key, value, key_cache, value_cache, slot_mapping):\n"
        "    global LEAST\n    LEAST = 1 << 12\n    write(key, value, key_cache, value_cache, slot_mapping)\n"
    )
    grew = "the kernel took more than 512 MiB of memory"
    told = CliRunner().invoke(cli, ["check-kernel", "copies.py:write", "--operation", "write"])
    assert (told.exit_code, told.output[: len(grew) + 6]) == (1, f"{grew}\ncase:"), told.output
    case = Case(operation="write", dtype="uint8", blocks=(1 << 28) + 9, slots=(1 << 29,))
    (tmp_path / "case.json").write_bytes(judge.case_bytes(Target("copies.py:write_far", Supports(), ()), case))
    told = CliRunner().invoke(cli, ["check-kernel", "--case", "case.json"])
    assert (told.exit_code, told.output[: len(grew) + 8]) == (1, f"{grew}: all of"), told.output


def test_what_ends_or_fails_elsewhere_is_told_here(endless: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(endless)
    told = CliRunner().invoke(cli, ["check-kernel", "abort.py:write", "--operation", "write"])
    assert isinstance(told.exception, ConfigError)
    assert "a kernel that can be loaded: its process ended by SIGABRT" in str(told.exception)
    told = CliRunner().invoke(cli, ["check-kernel", "spin.py:write"])
    assert isinstance(told.exception, ConfigError)
    assert told.exception.argument == "operation"
    told = CliRunner().invoke(cli, ["check-kernel", "spin.py:leave", "--operation", "write"])
    assert told.output.startswith("the kernel raises SystemExit: 0\n"), told


def test_a_library_that_is_none_is_refused(library: pathlib.Path, tmp_path: pathlib.Path) -> None:
    for name in (f"{library}:no_such_symbol", f"{tmp_path}/none.so:write"):
        with pytest.raises(ConfigError, match="TARGET"):
            target_of(name, "write")


def test_failures_before_a_hang_are_told(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a function in Python and in C: the mistake in the first line, the hang in the last."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "late.py").write_text(
        "calls = 0\n"
        "def write(key, value, key_cache, value_cache, slot_mapping):\n"
        "    global calls\n    calls += 1\n"
        "    while calls > 5: pass\n"
    )
    (tmp_path / "late.c").write_text(
        "int write(void *k, void *v, void *kc, void *vc, void *s) {\n"
        "  static int calls;\n  volatile int spin = 1;\n  if (++calls > 5) while (spin) ;\n  return 0;\n}\n"
    )
    subprocess.run(["cc", "-shared", "-fPIC", "-o", "late.so", "late.c"], check=True, cwd=tmp_path)
    for name in ("late.py:write", "./late.so:write"):
        told = CliRunner().invoke(cli, ["check-kernel", name, "--operation", "write", "--timeout", "0.5"])
        first, *others = told.output.splitlines()
        assert first.startswith("nothing is written"), told.output
        assert any("cases failed" in line for line in others), told.output
        assert any(line.startswith("then, at ") and "did not return" in line for line in others), told.output


def test_a_read_past_the_end_of_an_input_is_found(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that it reads there reaches the cache: only a page that nobody may touch can tell."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reader.py").write_text(
        "import ctypes\nfrom tests.testing.kernels.right import write as right\n"
        "def write(key, value, key_cache, value_cache, slot_mapping):\n"
        "    ctypes.string_at(slot_mapping.ctypes.data + slot_mapping.nbytes, 64)\n"
        "    right(key, value, key_cache, value_cache, slot_mapping)\n"
    )
    told = CliRunner().invoke(cli, ["check-kernel", "reader.py:write", "--operation", "write"])
    assert told.output.startswith("memory outside of all arrays is touched, or worse: the kernel ended by SIGSEGV")


def test_a_plain_writer_in_jax_is_right_without_nan_payloads() -> None:
    """XLA's scatter on a CPU quiets NaNs of the whole cache: asked for them, the first line says just that."""
    jax = pytest.importorskip("jax")

    def plain(key, value, key_cache, value_cache, slot_mapping):
        at = jax.numpy.where(slot_mapping < 0, key_cache.shape[0] * key_cache.shape[1], slot_mapping)
        block, slot = at // key_cache.shape[1], at % key_cache.shape[1]
        caches = ((key_cache, key), (value_cache, value))
        return tuple(cache.at[block, slot].set(new, mode="drop") for cache, new in caches)

    asked = {"arrays": "jax", "dtypes": ("bfloat16",), "contents": "keys and values", "heads": (2,), "reuse": 10}
    target = target_of(plain, "write", lacks=("two sizes",), **asked)
    assert "NaN payloads" in target.supports.lacks
    assert check(target, 60).failure is None
    failure = check(target_of(plain, "write", lacks=("two sizes",), has="NaN payloads", **asked), 60).failure
    assert failure is not None
    assert failure.kind.startswith("payloads of NaN are lost")


def test_wide_cases_are_among_those_that_are_drawn() -> None:
    """No token at all, tens of them, wide heads, hundreds of blocks, NaN and infinity among what is rounded."""
    found = [case for case, _ in zip(judge.cases_of(target_of(right.write, "write"), 0), range(1000), strict=False)]
    assert {0, 33, 130} <= {len(case.slots) for case in found}
    assert {40, 136} <= {case.key_size for case in found}
    assert 257 in {case.blocks for case in found}
    assert any(case.extremes for case in found)
    wide = [case for case in found if not case.slots or len(case.slots) > 7 or case.key_size > 8 or case.blocks == 257]
    assert 0.04 <= len(wide) / len(found) <= 0.06


def test_every_mistake_can_be_looked_for_in_wide_cases() -> None:
    """No token is a case, too: nothing that names a failure may fall over it."""
    for operation, seed in itertools.product(("write", "scatter", "gather", "copy_blocks", "zero"), range(12)):
        supports = Supports(operation=operation, lacks=("far blocks",))
        case = draw_case(RandomChoices(seed), supports, wide=True)
        if len(case.slots) + len(case.table) < 40:
            assert list(predictions(Call(case)))
    case = Case(operation="write", slots=())
    assert [name for name, left in predictions(Call(case)) if len(left[0])] == []


def test_numbers_of_tokens_are_chosen_from() -> None:
    target = target_of(right.write, "write", tokens=(64, 1))
    found = {len(case.slots) for case, _ in zip(judge.cases_of(target, 0), range(200), strict=False)}
    assert found == {64, 1}
    assert check(target, 60).failure is None


def test_infinity_is_saturated_and_a_nan_stays_one() -> None:
    def kept(key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale):
        """Infinity becomes NaN, as a cast without saturation makes it of float8_e4m3fn."""
        for cache, new, scale in ((key_cache, key, k_scale), (value_cache, value, v_scale)):
            scaled = new.astype(np.float32) * (np.float32(1) / np.float32(scale))
            largest = np.float32(448)
            clipped = np.where(np.isinf(scaled), scaled, np.clip(scaled, -largest, largest))
            write_slots(tokens(slot_mapping), cache.shape[1], ((cache, clipped.astype(cache.dtype)),))

    case = Case(
        operation="write", dtype="float8_e4m3fn", source_dtype="float32", slots=(2, 3, 4), extremes=True, key_size=8,
        value_size=8,
    )  # fmt: skip
    failure = repeat(target_of(kept, "write"), case).failure
    assert failure is not None
    assert failure.kind == "numbers beyond the type's range are not saturated"


@pytest.mark.parametrize(("field", "value"), [("contents", "keys and values"), ("dtypes", "int8"), ("heads", 2)])
def test_one_name_is_as_good_as_a_tuple_of_it(field: str, value) -> None:
    """A text is no tuple of its letters."""
    assert getattr(Supports(operation="write", **{field: value}), field) == (value,)
    assert getattr(target_of(right.write, "write", **{field: value}).supports, field) == (value,)


# Parts.


def test_an_unchanged_plan_is_the_definition() -> None:
    seen: set[str] = set()
    for operation in ("write", "scatter", "gather", "copy_blocks", "zero"):
        for seed in range(120):
            call = Call(draw_case(RandomChoices(seed), Supports(operation=operation), wide=seed % 4 == 3))
            if call.case.extremes:
                seen.add("NaN and infinity")
                continue  # the definition and the plan round NaN to other NaNs
            assert same(left_by(plan_of(call), call), expected(call).changes(call.before)), call.case
            seen.update(features_of(call.case))
    assert seen == set(FEATURES) - {"missing ids", "NaN in free slots", "window", "skip"}


@pytest.mark.parametrize(
    ("family", "form"),
    [("BL2NHD", 0), ("L2BNHD", 1), ("LB2NHD", 2), ("L2BHND", 6), ("LB2HND", 7), ("BL2HND", 8), ("2LBNHD", 9)],
)
def test_families_are_where_chunk_formats_have_their_pages(family: str, form: int) -> None:
    layers, blocks, slots, heads, size = 2, 3, 4, 5, 6
    sizes = {"block_size": slots, "heads": heads, "key_size": size, "value_size": size}
    placement = place(family, "keys and values", "bfloat16", blocks=blocks, layers=layers, **sizes)
    traits = TRAITS[EngineKVFormat(form)]
    page, tensors = slots * heads * size * 2, num_tensors(traits.structure, layers)
    tensor_bytes = 2 * layers * blocks * page // tensors
    for plane, part in enumerate(("key", "value")):
        for layer in range(layers):
            for block in range(blocks):
                index = page_index(traits.page_order, plane, layer, block, 2, layers, blocks)
                tensor = tensor_index(traits.structure, plane, layer, layers)
                start = tensor * tensor_bytes + index * page
                slot, head = (head_slot := (3, 2))
                inside = (head * slots + slot if traits.heads_first else slot * heads + head) * size * 2
                assert placement.element_address(part, layer, block, head_slot[1], slot, 0) == start + inside


def test_a_sparse_memory_tells_what_changed_and_no_more() -> None:
    memory = Memory(1 << 33)
    memory.array[5] = 1
    before = memory.snapshot()
    memory.array[5], memory.array[(1 << 32) + 7] = 2, 3
    after = before.copy()
    after[5:6], after[(1 << 32) + 7 : (1 << 32) + 8] = 2, 3
    for addresses, values in (memory.changes(before), after.changes(before)):
        assert addresses.tolist() == [5, (1 << 32) + 7]
        assert values.tolist() == [2, 3]
    assert after[PAGE - 1 : PAGE + 1].tolist() == [0, 0]


@kernel("write", lacks=("far blocks",), dtypes=("float32",))
def ends_with_its_input_changed(key, value, key_cache, value_cache, slot_mapping):
    right.write(key, value, key_cache, value_cache, slot_mapping)
    key[:] = 0


def reads_behind_the_end(query, key_cache, value_cache, kernel_block_table, cu_q_lens, kv_lens, scale):
    """Adds nothing of the slots behind the last token, but of each of them zero times its value."""
    found = right.attention(query, key_cache, value_cache, kernel_block_table, cu_q_lens, kv_lens, scale, None)
    for row, (start, end) in enumerate(itertools.pairwise(cu_q_lens.tolist())):
        last = kernel_block_table[row, (int(kv_lens[row]) - 1) // key_cache.shape[1]]
        found[start:end] += 0 * value_cache[last].astype(np.float32).sum()
    return found


def writes_beyond(key, value, key_cache, value_cache, slot_mapping, buffer):
    right.write(key, value, key_cache, value_cache, slot_mapping)
    buffer[-1] ^= 1


def overwrites_a_state(key, value, key_cache, value_cache, slot_mapping):
    right.write(key, value, key_cache, value_cache, slot_mapping)
    bits = key_cache.view(f"u{key_cache.itemsize}")
    free = [row for row in range(len(bits)) if row not in (slot_mapping // bits.shape[1])]
    bits[free[:1], 0, 0, 0] ^= 1


def returns_too_little(key_cache, value_cache, kernel_block_table):
    return key_cache[:1], value_cache[:1]


def rounds_to_zero(key, value, key_cache, value_cache, slot_mapping, k_scale=1.0, v_scale=1.0):
    def cut(new, scale):
        scaled = new.astype(np.float32) / np.float32(scale)
        exact = np.clip(scaled, -448, 448).astype(ml_dtypes.float8_e4m3fn)
        larger = np.abs(exact.astype(np.float32)) > np.abs(np.clip(scaled, -448, 448))
        return (exact.view(np.uint8) - larger).astype(np.uint8).view(ml_dtypes.float8_e4m3fn)

    pairs = ((key_cache, cut(key, k_scale)), (value_cache, cut(value, v_scale)))
    write_slots(tokens(slot_mapping), key_cache.shape[1], pairs)


@pytest.mark.parametrize(
    ("function", "operation", "options", "says"),
    [
        (ends_with_its_input_changed, "", {}, "an input is changed: key"),
        (writes_beyond, "write", {}, "bytes outside of all arrays are written"),
        (overwrites_a_state, "write", {}, "slots that no token or block of the call has are overwritten"),
        (reads_behind_the_end, "attention", {}, "slots that hold nothing for the query are read (NaN)"),
        (returns_too_little, "gather", {}, "the result has another shape"),
        (rounds_to_zero, "write", {"dtypes": ("float8_e4m3fn",)}, "numbers are rounded differently"),
    ],
)
def test_what_wrong_elements_have_in_common_is_told(function, operation: str, options, says: str) -> None:
    failure = check(target_of(function, operation, **({"lacks": ("far blocks",)} | options)), 300).failure
    assert failure is not None
    assert failure.text.startswith(says), failure.text


def test_numbers_in_free_slots_are_asked_alone() -> None:
    lacks = ("NaN in free slots", "window")
    assert check(target_of(reads_behind_the_end, "attention", lacks=lacks), 60).failure is None
    failure = check(target_of(reads_behind_the_end, "attention", lacks=("window",)), 60).failure
    assert failure is not None
    assert failure.case.poison


def test_a_case_is_not_made_smaller_than_a_kernel_takes() -> None:
    sizes = {"head_sizes": (6, 8), "heads": (2,), "block_sizes": (4,), "contents": ("keys and values",)}
    failure = check(target_of(PLANTED["padded_slots_written"].kernel, "write", **sizes)).failure
    assert failure is not None
    case = failure.case
    assert (case.heads, case.block_size) == (2, 4)
    assert {case.key_size, case.value_size} <= {6, 8}


def test_a_kernel_that_supports_nothing_is_no_success() -> None:
    def write(key, value, key_cache, value_cache, slot_mapping):
        raise NotImplementedError("nothing yet")

    with pytest.raises(ConfigError, match="nothing yet"):
        check(target_of(write, "write"), 2)


def test_what_is_not_supported_is_counted_by_name() -> None:
    verdict = check(target_of(right.write, "write", lacks=("offset",), dtypes=("int8",)), 50)
    assert verdict.not_asked["offset"] > 0
    assert set(verdict.features) & {"offset", "bfloat16", "latent"} == set()
    assert verdict.not_asked["latent"] > 0


@pytest.mark.parametrize(
    ("target", "options", "match"),
    [
        ("no.such.module:write", {"operation": "write"}, "TARGET"),
        ("nothing", {"operation": "write"}, "TARGET"),
        (right.write, {}, "operation"),
        (right.write, {"operation": "write", "lacks": ("speed",)}, "lacks"),
        (right.write, {"operation": "write", "axes": "BQHD"}, "axes"),
        (right.write, {"operation": "write", "layouts": ("XYZ",)}, "layouts"),
        (right.write, {"operation": "write", "device": "cuda"}, "device"),
        (lambda speed: None, {"operation": "write"}, "speed"),
        (lambda slot_maping: None, {"operation": "write"}, r"did you mean slot_mapping\b"),
    ],
)
def test_bad_targets_are_refused(target, options, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        target_of(target, **options)


def _scaled(key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale):
    """Takes one scale a tensor, where this content has one for each token and head."""


@pytest.mark.parametrize(
    ("operation", "wanted", "content", "missing"),
    [
        ("write", (), "int8 with scales", "key_scale_cache or key_scale_caches or buffer; _scaled takes key, value, "),
        ("write", ("buffer", "key"), "int8 with scales", "value or values"),
        ("write", ("kv_cache", "values"), "int8 with scales", "key_scale_cache or key_scale_caches or buffer"),
        ("gather", ("key_cache",), "keys and values", "value_cache or value_caches or buffer or kv_cache"),
        ("zero", ("key_caches", "value_caches"), "latent", "latent_cache or latent_caches or buffer or kv_cache"),
        ("scatter", ("buffer", "key", "value"), "int8 with scales", "key_scale or values"),
        ("write", ("buffer", "key", "value"), "int8 with scales", None),
        ("zero", ("kv_cache",), "latent", None),
    ],
)
def test_a_content_is_not_declared_without_arguments_of_all_its_parts(operation, wanted, content, missing) -> None:
    def takes():
        """Has parameters of these names."""

    takes.__signature__ = inspect.Signature(
        [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in wanted]
    )
    target, options = (takes if wanted else _scaled), {"operation": operation, "contents": content}
    if missing is None:
        assert target_of(target, **options).supports.contents == (content,)
        return
    with pytest.raises(ConfigError, match=f"contents = '{content}': expected a kernel that takes {missing}"):
        target_of(target, **options)


def test_scales_that_a_kernel_does_not_make_are_an_argument() -> None:
    options = {"operation": "write", "contents": "int8 with scales", "lacks": ("own scales",)}
    with pytest.raises(ConfigError, match="takes key_scale or values; <lambda> takes buffer, key, value"):
        target_of(lambda buffer, key, value: None, **options)


# The command, and a case in a file.


def test_the_command_saves_a_case_and_repeats_it(tmp_path: pathlib.Path) -> None:
    case, wrong = tmp_path / "case.json", f"{ROOT}/tests/testing/kernels/planted.py:only_keys_zeroed"
    told = CliRunner().invoke(cli, ["check-kernel", wrong, "--operation", "zero", "--draws", "50", "-o", str(case)])
    assert told.exit_code == 1
    assert told.output.startswith("only some parts are moved")
    again = CliRunner().invoke(cli, ["check-kernel", "--case", str(case)])
    assert again.exit_code == 1
    assert again.output.split("\n")[:3] == told.output.split("\n")[:3]
    right_kernel = f"{ROOT}/tests/testing/kernels/right.py:zero"
    other = CliRunner().invoke(cli, ["check-kernel", right_kernel, "--case", str(case)])
    assert other.exit_code == 0, other.output


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"zero"', '"levitate"'),
        ('t": "', 't": "X'),
        ('"heads": 1', '"heads": -1'),
        ('"table": [', '"tables": ['),
    ],
)
def test_a_damaged_case_is_refused(tmp_path: pathlib.Path, old: str, new: str) -> None:
    wrong = f"{ROOT}/tests/testing/kernels/planted.py:only_keys_zeroed"
    path = tmp_path / "case.json"
    CliRunner().invoke(cli, ["check-kernel", wrong, "--operation", "zero", "--draws", "50", "-o", str(path)])
    text = path.read_text()
    assert old in text
    with pytest.raises((ConfigError, LayoutError, FileError)):
        read_case(text.replace(old, new).encode(), "case.json")


# For test suites.


def test_two_kernels_are_compared() -> None:
    assert assert_writes_like(right.write, right.write, "write", draws=40).asked == 40
    with pytest.raises(AssertionError, match="padding tokens"):
        assert_writes_like(right.write, PLANTED["padded_slots_written"].kernel, "write", draws=100)


def test_the_fixture_asserts(hkv_assert_writes_like) -> None:
    hkv_assert_writes_like("definition", right.zero, "zero", draws=20)
    with pytest.raises(AssertionError, match="only some parts"):
        hkv_assert_writes_like("definition", PLANTED["only_keys_zeroed"].kernel, "zero")


@given(strategies.kernel_cases("scatter", dtypes="float16", contents="keys and values", lacks=("far blocks",)))
@settings(max_examples=25)
def test_cases_by_hypothesis(case) -> None:
    assert case.dtype == "float16"
    assert "missing ids" not in features_of(case)
    assert repeat(target_of(right.scatter, "scatter"), case).failure is None


@given(
    strategies.block_tables(4), strategies.slot_mappings(3, 2), strategies.page_contents((2, 3), "bfloat16"),
    strategies.placements(lacks=("far blocks",)),
)  # fmt: skip
@settings(max_examples=25)
def test_tables_slots_contents_and_placements(table, slots, content, placement) -> None:
    named = [block for block in table if block > 0]
    assert len(set(named)) == len(named) <= 3
    written = [slot for slot in slots if slot >= 0]
    assert len(set(written)) == len(written)
    assert max(slots) < 6
    assert content.shape == (2, 3)
    assert content.dtype == ml_dtypes.bfloat16
    assert placement.element_address(placement.content[0].name, 0, 0, 0, 0, 0) >= 0


def test_views_of_two_blocks_and_two_heads_are_told_apart() -> None:
    spec = FullAttention(block_size=2, num_kv_heads=2, head_size=2, head_size_v=2, dtype="uint8")
    layout = Layout.of_spec(spec, "LBNHC", num_blocks=2)
    pool = np.zeros(layout.end, np.uint8)
    key = view(pool, layout.part_view("key", 0)).transpose(0, 2, 1, 3)
    start = pool.ctypes.data
    assert_viewed_as(key, layout, "key", base=start)
    for wrong, match in (
        (key.transpose(2, 1, 0, 3), r"axes 0 and 2 \(blocks and heads\) are swapped"),
        (key.transpose(0, 2, 1, 3), r"axes 1 and 2 \(slots and heads\) are swapped"),
        (key.copy(), "bytes apart"),
        (key[0], "3 axes, not 4"),
        (key[:, :1], r"axis 1 \(slots\) has 1, not 2"),
    ):
        with pytest.raises(AssertionError, match=match):
            assert_viewed_as(wrong, layout, "key", base=start)
    with pytest.raises(AssertionError, match="begins at byte"):
        assert_viewed_as(view(pool, layout.part_view("value", 0)).transpose(0, 2, 1, 3), layout, "key", base=start)
    sizes = dict.fromkeys(("block_size", "heads", "key_size", "value_size", "blocks"), 2)
    planes = place("LB2NHD", "keys and values", "uint8", layers=1, **sizes)
    halves = np.zeros((2, 2, 2, 2, 2), np.uint8)
    assert_viewed_as(halves[:, 0], planes, "key")
    with pytest.raises(AssertionError, match="axis 0"):
        assert_viewed_as(halves[0], planes, "key")
