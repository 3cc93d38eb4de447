"""Asking XLA:CPU for the caller's thread and native loops, and never over what is set."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
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
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(one), str(threads), "False", str(native), "1"]
