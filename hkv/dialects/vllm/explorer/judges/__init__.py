"""The invariants, each as a function of one operation with the cache before and after it. One lane; `vmap` makes many.

They are the array form of `hkv.dialects.vllm.invariants`, which see one state at a time and are their twins: a property
test holds them to the same verdict, invariant by invariant. `monotonicity` is not among them: it follows from
`soundness`, `maximality` and `draft margin` wherever hits are exactly as defined. `identity` holds by construction:
keys are made from content here. `shadow tags` and `event index` need a history, which states do not have.
"""

from hkv.dialects.vllm.explorer.judges import pool, rows
from hkv.dialects.vllm.explorer.judges.rows import JUDGES, Moment, moment_of

__all__ = ["JUDGES", "Moment", "moment_of", "pool", "rows"]
