"""Known defects of vLLM 0.33, of its planning and its cache manager: the contract, and what the engine does instead."""

from __future__ import annotations

from hkv.contract.bugs import Bug, listed

BUGS = listed(
    Bug(
        name="window-sizes-abort-grouping",
        engine="vLLM 0.33 is_kv_cache_spec_uniform",
        contract="full-attention layers that were promoted from different windows share a group or get several",
        behaviour="the difference escapes as a ValueError and no plan is made",
        part="planning",
    ),
    Bug(
        name="window-latent-merge",
        engine="vLLM 0.33 SlidingWindowMLASpec.merge",
        contract="a group's layers agree in every size, and the group keeps their quantization mode",
        behaviour="head sizes are not compared and the merged spec has no quantization mode",
        part="planning",
    ),
    Bug(
        name="packed-split-loses-layers",
        engine="vLLM 0.33 _get_packed_kv_cache_groups",
        contract="every layer is in exactly one group",
        behaviour="layers of several page sizes are dealt out in step: those left over are lost, and planning aborts",
        part="planning",
    ),
    Bug(
        name="absent-layers-get-tensors",
        engine="vLLM 0.33 _project_kv_cache_groups_to_worker",
        contract="a pipeline stage is given tensors for its own layers only",
        behaviour="a stage without a layer of a group of mixed pages is given tensors for all of the group's layers",
        part="planning",
    ),
    Bug(
        name="latent-window-promotion",
        engine="vLLM 0.33 _promote_local_kv_cache_specs",
        contract="with the hybrid manager off, a latent window layer is cached like a latent layer",
        behaviour="a field the latent spec does not have is passed to it (TypeError), and planning aborts",
        part="planning",
    ),
    Bug(
        name="stale-page-padding",
        engine="vLLM 0.33 unify_kv_cache_spec_page_size",
        contract="a padded page that is scaled keeps its padding in proportion; an aligned page stays aligned",
        behaviour="the old padding stays, or the alignment is overridden: planning aborts, or pages are misaligned",
        part="planning",
    ),
    Bug(
        name="scattered-heads-unaligned",
        engine="vLLM 0.33 _get_layer_block_stride",
        contract="the distance between two blocks of a layer is a multiple of what its kernel asks for",
        behaviour="only pages are aligned: in LHBNC, which stores head after head, blocks lie a head's bytes apart",
        part="planning",
    ),
    Bug(
        name="finder-index-error",
        engine="vLLM 0.33 find_longest_cache_hit of SlidingWindowManager, ChunkedLocalAttentionManager, MambaManager",
        contract="a lookup looks at the keys that a request has, and at no other",
        behaviour="with a hash lookahead of two or more, and no full-attention group that bounds them, these finders "
        "index keys beyond the last and the lookup fails",
    ),
    Bug(
        name="external-state-not-counted",
        engine="vLLM 0.33 MambaManager.get_num_blocks_to_allocate",
        contract="a request whose blocks do not fit is refused before anything changes",
        behaviour="the state for tokens from elsewhere is not in the estimate, and the allocation fails halfway",
    ),
    Bug(
        name="negative-estimate",
        engine="vLLM 0.33 MambaManager.get_num_blocks_to_allocate",
        contract="a group that needs nothing adds nothing to the admission estimate",
        behaviour="after rejected drafts it adds -1, hides another group's block, and the allocation fails halfway",
    ),
    Bug(
        name="checkpoint-beyond-keys",
        engine="vLLM 0.33 MambaManager._cache_partial_tail_block",
        contract="a state is registered only at a length whose tokens are verified",
        behaviour="a chunk of more than two Mamba blocks that ends in drafts plans a checkpoint beyond the last key, "
        "and registering it fails",
    ),
    Bug(
        name="plan-outlives-refusal",
        engine="vLLM 0.33 MambaManager.get_num_blocks_to_allocate",
        contract="a chunk that is refused leaves nothing behind: no state of it is registered",
        behaviour="the checkpoint that was planned for it stays planned, and the next registration asserts that the "
        "row has its column, or registers a state that was never computed",
    ),
    Bug(
        name="checkpoint-under-later-key",
        engine="vLLM 0.33 MambaManager.cache_blocks",
        contract="a state is known by the key of the tokens that it stands after, and by no other",
        behaviour="where keys lag behind tokens, a checkpoint that still stands when the end of its column gets a key "
        "is registered under that: a longer prefix is resumed from a shorter one's state",
    ),
    Bug(
        name="begun-state-under-later-key",
        engine="vLLM 0.33 MambaManager.cache_blocks",
        contract="a state is known by the key of the tokens that it stands after, and by no other",
        behaviour="a chunk that leaves a checkpoint may begin inside a block and go on behind it: the block, which "
        "still holds the state that the chunk began from, is registered as the one at its end",
    ),
    Bug(
        name="tail-key-outlives-state",
        engine="vLLM 0.33 MambaManager._cache_partial_tail_block",
        contract="the copy that a request owes to the cache, of a state it registered, is dropped with that state",
        behaviour="with a prefill lookahead of three or more a state may be registered when the request has gone on to "
        "the next column; it is given back, and the request's next allocation fails for want of it",
    ),
    Bug(
        name="copied-before-written",
        engine="vLLM 0.33 FullAttentionManager, get_num_blocks_to_allocate",
        contract="what a hit adopts is written before the request reads or copies it: else it waits for the next step",
        behaviour="a hit that ends inside a block which another request fills in the same step is granted; the block "
        "is copied before the step runs, and the request reads what was never written",
    ),
    Bug(
        name="window-one-never-hits",
        engine="vLLM 0.33 SlidingWindowManager",
        contract="a window of one token reads no earlier token: it can be resumed from any length",
        behaviour="such a group registers nothing, for it needs nothing, yet looks for a registered block: "
        "neither it nor any cache that contains it ever hits",
    ),
    Bug(
        name="hit-reported-by-columns",
        engine="vLLM 0.33 BlockPool.emit_cached_block_events",
        contract="a hit that is published as events names the blocks that it consists of, under their keys",
        behaviour="every column up to the hit is named, also where there is no block, by the key of a whole block of "
        "one rank: of a block that the hit ends inside one that is not cached, or none at all (IndexError)",
    ),
    Bug(
        name="offer-outlives-state",
        engine="vLLM 0.33 KVCacheManager.take_boundary_state_offloads",
        contract="a state that a connector is offered is in its block, which is held and known by the state's key",
        behaviour="states of requests that ended are left out, and no others: a block that its request has outgrown, "
        "or that lost its key, since it was registered is offered, though it is free, or somebody else's",
    ),
)
