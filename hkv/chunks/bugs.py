"""Known defects of LMCache 0.5.6: the contract, and what it does instead."""

from __future__ import annotations

from hkv.contract.bugs import Bug, listed

BUGS = listed(
    Bug(
        name="lmcache-group-key",
        engine="LMCache 0.5.6 KernelGroupIdentity",
        contract="layers of one kernel group have the same number of blocks and the same block stride",
        behaviour="neither is in the key: the first layer's are used for all, and others are read at the wrong place",
        part="chunks",
    ),
    Bug(
        name="lmcache-full-window",
        engine="LMCache 0.5.6 full_sw_kv",
        contract="keeping whole chunks of windowed groups leaves recurrent groups as they are",
        behaviour="the part of a chunk that a recurrent group keeps is widened too",
        part="chunks",
    ),
    Bug(
        name="lmcache-null-mask",
        engine="LMCache 0.5.6 store",
        contract="a chunk whose kept blocks are all null has nothing to store",
        behaviour="blocks outside the window count as well, and an object of the null block's bytes is stored",
        part="chunks",
    ),
    Bug(
        name="lmcache-two-blocks",
        engine="LMCache 0.5.6 discovery of vLLM's formats",
        contract="a tensor whose shape does not show which axis is K and V, and which the blocks, is refused",
        behaviour="of two axes of extent 2 the first is taken for K and V: two blocks that each hold K and V are read "
        "as planes, and half of what is stored is another block's",
        part="chunks",
    ),
)
