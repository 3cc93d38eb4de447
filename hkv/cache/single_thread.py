"""Asks XLA:CPU to run programs on the thread that calls them.

A serving step is some two hundred small pieces of work, each about half a microsecond. XLA:CPU hands pieces to a pool
of threads, and JAX hands the whole program to another thread; waking those takes longer than the work: a step takes
about twice as long, and more on a busy machine. A program that waits for every step, as a scheduler on the host does,
gains by neither. Programs that compute with large arrays (the model itself, on CPU) lose their cores by it.
"""

from __future__ import annotations

import os

import jax

THREADS = "PJRT_NPROC"
"""The environment variable for the number of threads in the pool of XLA's CPU client, read when JAX is first used."""


def enable() -> bool:
    """Asks for one thread and for programs that have run when JAX returns; for programs that belong to HKV.

    To be called before JAX is first used. A number of threads that is set already stays.

    Returns:
      Whether one thread is asked for now.
    """
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    return os.environ.setdefault(THREADS, "1") == "1"
