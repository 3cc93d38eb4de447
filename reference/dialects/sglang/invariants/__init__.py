"""Invariants of SGLang's cache, of every state and every operation, told from states, answers and the story alone.

The engine has such checks of its own (`sanity_check`, `SchedulerInvariantChecker`): ledgers are sums of nodes, locks
are hierarchical, orders have the nodes that they should. These ask for more: whose the locks are, that a match is sound
and the longest, that leaves leave in the order of the policy, and that each page is somewhere.
"""

from reference.dialects.sglang.invariants import tree, pages, entries, locks, order, ledgers  # isort: skip
from reference.dialects.sglang.invariants.register import INVARIANTS

__all__ = ["INVARIANTS", "entries", "ledgers", "locks", "order", "pages", "tree"]
# Modules are imported in the order in which invariants are asked, of which the first that is broken is told: causes
# before what follows from them.
