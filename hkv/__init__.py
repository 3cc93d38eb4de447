"""HKV: the executable reference for hybrid KV caches.

Say what you cache, and what happened; HKV says what every block id, hit length, eviction, address and byte must be.
`docs/api.md` describes what stands here, and the parts beside it: `hkv.views`, `hkv.mesh`, `hkv.block_tables`,
`hkv.chunks`, `hkv.rtp_llm`, `hkv.serving` and `hkv.testing`; everything else is internal. Importing this package
imports neither JAX nor NumPy: each name is loaded when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hkv._lazy import loader
from hkv.version import __version__ as __version__

if TYPE_CHECKING:
    from hkv import testing
    from hkv.cache.cache import Cache, allocate, arrive, cache_config, finish, free, init, longest_hit, step
    from hkv.dialects.vllm.planning.engine_plan import plan
    from hkv.errors import HKVError
    from hkv.layout.block_layout import Layout
    from hkv.model.huggingface.reading import read_model
    from hkv.model.topology import Topology
    from hkv.oracle.comparison import diff
    from hkv.oracle.verbs import check, explain, record
    from hkv.paged.operations import copy_blocks, gather, scatter, write, zero_blocks
    from hkv.replay.verb import compare, replay_trace, sweep
    from hkv.spec import ChunkedLocal, FullAttention, Mamba, MLAAttention, OpaqueState, SlidingWindow
    from hkv.state.status import Status

__all__ = [
    "Cache",
    "ChunkedLocal",
    "FullAttention",
    "HKVError",
    "Layout",
    "MLAAttention",
    "Mamba",
    "OpaqueState",
    "SlidingWindow",
    "Status",
    "Topology",
    "allocate",
    "arrive",
    "cache_config",
    "check",
    "compare",
    "copy_blocks",
    "diff",
    "explain",
    "finish",
    "free",
    "gather",
    "init",
    "longest_hit",
    "plan",
    "read_model",
    "record",
    "replay_trace",
    "scatter",
    "step",
    "sweep",
    "testing",
    "write",
    "zero_blocks",
]

_MODULES = {
    "hkv.cache.cache": "Cache allocate arrive cache_config finish free init longest_hit step",
    "hkv.dialects.vllm.planning.engine_plan": "plan",
    "hkv.errors": "HKVError",
    "hkv.layout.block_layout": "Layout",
    "hkv.model.huggingface.reading": "read_model",
    "hkv.model.topology": "Topology",
    "hkv.oracle.comparison": "diff",
    "hkv.oracle.verbs": "check explain record",
    "hkv.paged.operations": "copy_blocks gather scatter write zero_blocks",
    "hkv.replay.verb": "compare replay_trace sweep",
    "hkv.spec": "ChunkedLocal FullAttention MLAAttention Mamba OpaqueState SlidingWindow",
    "hkv.state.status": "Status",
    "hkv.testing": "testing",
}

__getattr__ = loader(__name__, _MODULES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
