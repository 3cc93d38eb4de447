"""Asking XLA:CPU for the caller's thread, and never over what is set."""

import subprocess
import sys

import pytest

PROGRAM = """
import pathlib
from hkv.cache import single_thread
print(single_thread.enable())
import jax, jax.numpy as jnp
jax.jit(lambda x: x + 1)(jnp.zeros(3)).block_until_ready()
names = [task.joinpath("comm").read_text() for task in pathlib.Path("/proc/self/task").iterdir()]
print(sum("XLAEigen" in name for name in names), jax.config.read("jax_cpu_enable_async_dispatch"))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="threads are counted in Linux's /proc")
@pytest.mark.parametrize(("set_before", "one", "threads"), [(None, True, 1), ("1", True, 1), ("3", False, 3)])
def test_as_many_threads_as_are_asked_for(monkeypatch, set_before, one, threads):
    monkeypatch.delenv("PJRT_NPROC", raising=False)
    if set_before:
        monkeypatch.setenv("PJRT_NPROC", set_before)
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(one), str(threads), "False"]
