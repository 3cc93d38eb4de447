"""Asking XLA for native loops: once, and never over what is set."""

import os
import subprocess
import sys

import pytest

from hkv.machine import native_loops

PROGRAM = """
from hkv.machine import native_loops
native_loops.enable()
import jax, jax.numpy as jnp
def long(x):
    def inner(c):
        return c[0] + 1, c[1].at[c[0] % 7].add(c[0])
    def outer(c):
        i, y = c
        _, y = jax.lax.while_loop(lambda d: d[0] < i % 5, inner, (0, y))
        return i + 1, y + y[::-1]
    return jax.lax.while_loop(lambda c: c[0] < 100, outer, (0, x))
text = jax.jit(long).lower(jnp.zeros(2000, jnp.int32)).compile().as_text()
print(text.count("while("))
print(text.split("ENTRY")[1].count("xla_cpu_small_call"))
"""


@pytest.mark.parametrize(
    ("before", "after", "asked"),
    [
        (None, native_loops.FLAG, True),
        ("", native_loops.FLAG, True),
        ("--xla_a=1", f"--xla_a=1 {native_loops.FLAG}", True),
        (native_loops.FLAG, native_loops.FLAG, True),
        ("--xla_backend_extra_options=a=1", "--xla_backend_extra_options=a=1", False),
    ],
)
def test_what_is_set_stays(monkeypatch, before, after, asked):
    if before is None:
        monkeypatch.delenv("XLA_FLAGS", raising=False)
    else:
        monkeypatch.setenv("XLA_FLAGS", before)
    assert native_loops.enable() is asked
    assert native_loops.os.environ["XLA_FLAGS"] == after


@pytest.mark.parametrize("limit", [native_loops.LIMIT, 1024])
def test_xla_makes_one_function_of_a_large_loop(monkeypatch, limit):
    """And does not with its own limit: the option is what decides."""
    monkeypatch.setenv("XLA_FLAGS", f"--xla_backend_extra_options={native_loops.OPTION}={limit}")
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    loops, native = map(int, done.stdout.split())
    assert loops
    assert native == (1 if limit == native_loops.LIMIT else 0)


SERVING = """
import sys, warnings
from hkv.machine import native_loops
when = sys.argv[1]
if when == "before":
    native_loops.enable()
import jax
jax.device_count()
if when == "after":
    native_loops.enable()
from hkv.dialects.vllm import machine as cache
from hkv.dialects.vllm.config import VllmConfig
from hkv.dialects.vllm.rules.operations import Batch, Code
from hkv.spec import spec_from_text
from hkv.model.topology import Topology
topology = Topology.of_specs([spec_from_text("full:1")])
config = VllmConfig(
    topology=topology, num_blocks=4, hash_block_size=1, scheduler_block_size=1, max_model_len=4
)
parameters, state = cache.init(config, cache.buckets_for(config))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for code in (Code.STEP, Code.RESET):
        program = jax.jit(cache.pure(only=(code,)))
        program.lower(parameters, state, Batch().add(code).build())
for warning in caught:
    print(warning.category.__name__, warning.message)
"""

NAME = native_loops.InterpretedLoopsWarning.__name__


@pytest.mark.parametrize(
    ("when", "flags", "remedy"),
    [
        ("never", "", "call hkv.machine.native_loops.enable() before JAX is first used"),
        ("after", "", "call hkv.machine.native_loops.enable() before JAX is first used"),
        ("before", "--xla_backend_extra_options=xla_a=1", f"add {native_loops.OPTION}={native_loops.LIMIT} to"),
        ("before", "", None),
    ],
)
def test_a_program_with_interpreted_loops_warns_once(monkeypatch, when, flags, remedy):
    """Too late counts: XLA has read its options by then, whatever the environment says."""
    monkeypatch.setenv("XLA_FLAGS", flags)
    done = subprocess.run([sys.executable, "-c", SERVING, when], capture_output=True, text=True, check=True)
    warned = done.stdout.splitlines()
    assert len(warned) == (remedy is not None)
    assert all(line.startswith(NAME) and remedy in line for line in warned)


# Asking for the caller's thread besides, and never over what is set.


LOOP = """
import os, pathlib
from hkv.serving import single_thread
print(single_thread.enable())
import jax, jax.numpy as jnp
loop = jax.jit(lambda x: jax.lax.while_loop(lambda x: x[0] < 9, lambda x: x + 1, x))
compiled = loop.lower(jnp.zeros(4096)).compile()
compiled(jnp.zeros(4096)).block_until_ready()
names = [task.joinpath("comm").read_text() for task in pathlib.Path("/proc/self/task").iterdir()]
print(sum("XLAEigen" in name for name in names), jax.config.read("jax_cpu_enable_async_dispatch"))
print("xla_cpu_small_call" in compiled.as_text(), os.environ["XLA_FLAGS"].count("xla_cpu_scheduler_type"))
"""

SET = "--xla_cpu_scheduler_type=CPU_SCHEDULER_TYPE_DEFAULT"
NONE = "--xla_backend_extra_options=xla_cpu_small_while_loop_byte_threshold=0"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="threads are counted in Linux's /proc")
@pytest.mark.parametrize(
    ("set_before", "flags", "one", "threads", "native"),
    [(None, "", True, 1, True), ("1", SET, True, 1, True), ("3", f"{SET} {NONE}", False, 3, False)],
)
def test_what_is_asked_for_and_what_stays(set_before, flags, one, threads, native):
    environment = {name: value for name, value in os.environ.items() if name not in ("PJRT_NPROC", "XLA_FLAGS")}
    environment |= {"XLA_FLAGS": flags} | ({"PJRT_NPROC": set_before} if set_before else {})
    done = subprocess.run([sys.executable, "-c", LOOP], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(one), str(threads), "False", str(native), "1"]
