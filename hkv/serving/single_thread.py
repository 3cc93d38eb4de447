"""Asks XLA:CPU to run programs on the thread that calls them, and short loops as one piece of native code.

A serving step is some two hundred small pieces of work, each about half a microsecond. XLA:CPU hands pieces to a pool
of threads, and JAX hands the whole program to another thread; waking those takes longer than the work: a step takes
about twice as long, and more on a busy machine. A program that waits for every step, as a scheduler on the host does,
gains by neither. Programs that compute with large arrays (the model itself, on CPU) lose their cores by it.

A pool of one thread is not enough: the caller still gives it pieces wherever many are ready at once, two or three times
a step. Under XLA's schedule for the least memory pieces use the same memory again and wait for each other, so that
fewer are ready: it happens once.
"""

from __future__ import annotations

import os

import jax

THREADS = "PJRT_NPROC"
"""The environment variable for the number of threads in the pool of XLA's CPU client, read when JAX is first used."""

FLAGS = "XLA_FLAGS"
"""The environment variable with XLA's options, read when JAX is first used."""

NATIVE = 1 << 20
"""Bytes that a loop may touch to be one piece of native code: hashing's do by far, those over a model's layers not."""

OPTIONS = (
    "--xla_cpu_scheduler_type=CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",
    f"--xla_backend_extra_options=xla_cpu_small_while_loop_byte_threshold={NATIVE}",
)


def enable() -> bool:
    """Asks for one thread and for programs that have run when JAX returns; for programs that belong to HKV.

    To be called before JAX is first used. A number of threads, and options of XLA, that are set already stay.

    Returns:
      Whether one thread is asked for now.
    """
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    before = os.environ.get(FLAGS, "")
    missing = [option for option in OPTIONS if option.split("=")[0] not in before]
    os.environ[FLAGS] = " ".join([before, *missing]).strip()
    return os.environ.setdefault(THREADS, "1") == "1"
