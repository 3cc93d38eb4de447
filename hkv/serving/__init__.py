"""Serving experiments inside `jit`: one value from a plan to the cache, its pool and its block tables.

`from_plan` or `from_config` make a `Serving`. A turn is `step`, then for each layer `write` and `attend`, or
`read_state` and `write_state`; `arrive` and `finish` stand between turns, `schedule` selects its tokens. `store`
and `load` move prefixes to tiers and back; `save` and `restore`, `save_orbax` and `restore_orbax` keep it all in files.
But for those, and the first two, all are pure functions on one pytree (`docs/serving.md`).
"""

from hkv.serving.engine_metadata import Ragged, carry_states, kernel_pages, ragged, sglang_jax, tpu_inference
from hkv.serving.files import restore, restore_orbax, save, save_orbax
from hkv.serving.pages import LayerPages, LayerStack
from hkv.serving.scheduler import StepPlan, schedule, victim
from hkv.serving.serving import (
    Serving,
    Turn,
    arrive,
    attend,
    checkpoint_tokens,
    finish,
    from_config,
    from_plan,
    gather,
    mark_written,
    read_state,
    step,
    write,
    write_state,
)
from hkv.serving.tiers import Offload, load, store

__all__ = [
    "LayerPages",
    "LayerStack",
    "Offload",
    "Ragged",
    "Serving",
    "StepPlan",
    "Turn",
    "arrive",
    "attend",
    "carry_states",
    "checkpoint_tokens",
    "finish",
    "from_config",
    "from_plan",
    "gather",
    "kernel_pages",
    "load",
    "mark_written",
    "ragged",
    "read_state",
    "restore",
    "restore_orbax",
    "save",
    "save_orbax",
    "schedule",
    "sglang_jax",
    "step",
    "store",
    "tpu_inference",
    "victim",
    "write",
    "write_state",
]
