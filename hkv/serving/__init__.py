"""Serving experiments inside `jit`: one value from a plan to the cache, its pool and its block tables.

`from_plan` or `from_config` make a `Serving`. A turn is `step`, then for each layer `write` and `attend`, or
`read_state` and `write_state`; `arrive` and `finish` stand between turns, `schedule` says what a turn computes, `save`
and `restore` keep it all in a file. All but those two, and the first two, are pure functions on one pytree
(`docs/serving.md`).
"""

from hkv.serving.engine_metadata import Ragged, carry_states, kernel_pages, ragged, sglang_jax, tpu_inference
from hkv.serving.files import restore, save
from hkv.serving.pages import LayerPages
from hkv.serving.scheduler import Plan, schedule, victim
from hkv.serving.serving import (
    Serving,
    Turn,
    arrive,
    attend,
    finish,
    from_config,
    from_plan,
    gather,
    read_state,
    step,
    write,
    write_state,
)

__all__ = [
    "LayerPages",
    "Plan",
    "Ragged",
    "Serving",
    "Turn",
    "arrive",
    "attend",
    "carry_states",
    "finish",
    "from_config",
    "from_plan",
    "gather",
    "kernel_pages",
    "ragged",
    "read_state",
    "restore",
    "save",
    "schedule",
    "sglang_jax",
    "step",
    "tpu_inference",
    "victim",
    "write",
    "write_state",
]
