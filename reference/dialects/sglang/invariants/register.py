"""The register that invariants are entered in."""

from hkv.contract.invariant import Register
from hkv.dialects.sglang import log as structs

INVARIANTS = Register(structs.NAME)

TREE = ("tree",)
"""Needed by invariants that look at nodes."""
