"""Settings with which RTP-LLM serves a model, as far as its pools depend on them."""

from __future__ import annotations

import dataclasses

from hkv.contract.option_fields import option
from hkv.errors import PlanError
from hkv.limits import MAX_BLOCKS, MAX_RANKS, MAX_SPECULATIVE_TOKENS, MAX_TOKENS, check_whole

ROLES = ("both", "prefill", "decode")
"""Work of a server: prompts, decoding, or both (RTP-LLM `RoleType` PREFILL, DECODE, PDFUSION)."""

STATE_DTYPES = ("bfloat16", "float32")
"""Element types of recurrent states that RTP-LLM's server accepts."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RtpOptions:
    """Settings with which RTP-LLM serves a model.

    Attributes:
      modules: copies of the draft, one for each of its steps (MTP) or one in all (EAGLE).
      role: one of `ROLES`; left out, `prefill` where blocks are dealt out, else `both`.
      prefill_ranks: of a decode server, the `ranks` of the prefill servers behind it (RTP-LLM `prefill_cp_size`): its
        rings and windows are as long as theirs together.
      pinned: fixed pools lie in pinned host memory; those of `explicit_blocks`, by the tags of independent groups, are
        paid from the memory otherwise.
      block_size: tokens per block.
      kernel_block_size: tokens per kernel block, 0 for the block's own.
      drafts: draft tokens of a cycle.
      tensor_parallel: ranks that split the heads.
      ranks: ranks of a prefill server among which a sequence's blocks are dealt out (RTP-LLM `kv_cache_sharded`, its
        tensor-parallel ranks, which then do not split heads).
      state_dtype: element type of recurrent states that a model's config describes, whatever the config says of them
        (RTP-LLM `ssm_state_dtype`, a flag of its server).
    """

    modules: int = option(
        1,
        "draft_modules",
        "--draft-modules",
        type=range(1, MAX_SPECULATIVE_TOKENS + 1),
        help="Copies of the draft, with --dialect rtp-llm.",
    )
    pools: str = option(
        "shared",
        default=None,
        type=("shared", "independent"),
        help="One pool, or one a group; left out, one where the model's groups can share it.",
    )
    role: str = option("", default=None, type=ROLES, help="Work of the server.  [default: both]")
    prefill_ranks: int = option(
        1,
        type=range(1, MAX_RANKS + 1),
        help="Context-parallel ranks of the prefill servers behind a decode server.",
    )
    step: int = option(
        1,
        "linear_step",
        "--linear-step",
        type=range(0, MAX_TOKENS + 1),
        help="Blocks between two kept states, by which pools of windows shrink.",
    )
    pinned: bool = option(
        False, "pinned_pools", "--pinned-pools", help="Put pools of rings and windows into pinned memory."
    )
    explicit_blocks: tuple[tuple[str, int], ...] = option(
        (), metavar="TAG=N", help="Blocks of the pool of that group; repeatable."
    )
    block_size: int = 64
    kernel_block_size: int = 0
    drafts: int = 0
    tensor_parallel: int = 1
    ranks: int = 1
    state_dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        check_whole("block_size", self.block_size, 1, MAX_TOKENS, PlanError)
        check_whole("kernel_block_size", self.kernel_block_size, 0, MAX_TOKENS, PlanError)
        check_whole("step", self.step, 0, MAX_TOKENS, PlanError)
        for name in ("tensor_parallel", "ranks", "prefill_ranks"):
            check_whole(name, getattr(self, name), 1, MAX_RANKS, PlanError)
        for name, least in (("modules", 1), ("drafts", 0)):
            check_whole(name, getattr(self, name), least, MAX_SPECULATIVE_TOKENS, PlanError)
        if self.pools not in ("shared", "independent"):
            raise PlanError("pools", self.pools, "shared or independent")
        if self.state_dtype not in STATE_DTYPES:
            raise PlanError("state_dtype", self.state_dtype, f"one of RTP-LLM's: {', '.join(STATE_DTYPES)}")
        if not self.role:
            object.__setattr__(self, "role", "prefill" if self.ranks > 1 else "both")
        if self.role not in ROLES:
            raise PlanError("role", self.role, f"one of {', '.join(ROLES)}")
        self._check_ranks()
        self._check_explicit()

    def _check_ranks(self) -> None:
        if self.ranks > 1 and self.tensor_parallel > 1:
            expected = "1 where blocks are dealt out: RTP-LLM's ranks either split heads or deal blocks out"
            raise PlanError("tensor_parallel", self.tensor_parallel, expected)
        if self.ranks > 1 and self.role != "prefill":
            raise PlanError("role", self.role, "prefill where blocks are dealt out to several ranks")
        if self.prefill_ranks > 1 and self.role != "decode":
            raise PlanError("prefill_ranks", self.prefill_ranks, "1 unless the role is decode: ranks of its prefill")

    def _check_explicit(self) -> None:
        for tag, count in self.explicit_blocks:
            check_whole(f"explicit_blocks of {tag}", count, 2, MAX_BLOCKS, PlanError)
        tags = [tag for tag, _ in self.explicit_blocks]
        if len(set(tags)) != len(tags):
            raise PlanError("explicit_blocks", tags, "each group once")
        if tags and self.pools == "shared":
            raise PlanError("explicit_blocks", tags, "none in a shared pool, of which every group has all blocks")

    @property
    def slicing_ranks(self) -> int:
        """Ranks whose tokens a ring or window holds: this server's, or those of the prefill behind a decode server."""
        return self.prefill_ranks if self.role == "decode" else self.ranks
