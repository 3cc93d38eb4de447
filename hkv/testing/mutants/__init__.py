"""Published bugs of KV caches, as mutants of this code: a suite is worth the mutants it catches."""

from hkv.testing.mutants.catalogue import MUTANTS, SECTIONS
from hkv.testing.mutants.judge import Verdict, judge
from hkv.testing.mutants.mutant import Mutant
from hkv.testing.mutants.patch import Patch, applied

__all__ = ["MUTANTS", "SECTIONS", "Mutant", "Patch", "Verdict", "applied", "judge"]
