"""The operation log: header, operations and answers as typed values; `docs/oplog.md` defines the format."""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta

from hkv.keys.chained import SEED
from hkv.limits import MAX_TOKENS

# What only the JSON schema says of a value: decoding leaves ranges to `file.py`, which names the field and the value.
Count: TypeAlias = Annotated[int, Meta(extra_json_schema={"minimum": 0, "maximum": MAX_TOKENS})]
Positive: TypeAlias = Annotated[int, Meta(extra_json_schema={"minimum": 1, "maximum": MAX_TOKENS})]
Token: TypeAlias = Annotated[int, Meta(extra_json_schema={"minimum": -MAX_TOKENS - 1, "maximum": MAX_TOKENS})]
Key: TypeAlias = Annotated[str, Meta(extra_json_schema={"pattern": "^[0-9a-f]*$"})]
ById = Meta(extra_json_schema={"propertyNames": {"pattern": "^[0-9]+$"}})
NotEmpty = Meta(extra_json_schema={"minItems": 1})
WholeKey: TypeAlias = Annotated[str, Meta(extra_json_schema={"pattern": "^([0-9a-f]{2})+$"})]

FULL = "full"
"""The report mode in which hits are published as events (vLLM 0.33 `kv_cache_report_mode`)."""

Rows: TypeAlias = list[list[Count]]
"""Block ids of one request, per group."""


class Header(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """The first line: the configuration. Attributes as `hkv.dialects.vllm.config.VllmConfig` explains them.

    Version 2 adds `watermark`, `shared_prefix_checkpoint`, `bugs`, and the kinds `mla` and `opaque`; a version 1 header
    must not use them. Version 3 adds `hash_seed`, `zeroing`, `offloads`, the hash `given`, and of windows
    `extra_retained_tokens`.
    """

    oplog: Annotated[int, Meta(extra_json_schema={"enum": [1, 2, 3, 4]})]
    dialect: Annotated[str, Meta(extra_json_schema={"const": "vllm-0.33"})]
    feature: Annotated[str, Meta(extra_json_schema={"minLength": 1})]
    num_blocks: Positive
    groups: Annotated[list[Annotated[dict[str, Any], Meta(extra_json_schema={"$ref": "#/$defs/group"})]], NotEmpty]
    hash: Annotated[str, Meta(extra_json_schema={"enum": ["given", "sha256", "sha256_cbor", "xxhash", "xxhash_cbor"]})]
    hash_block_size: Positive
    scheduler_block_size: Positive
    hash_lookahead: Count
    caching: bool
    eagle: bool
    eagle_groups: list[Count]
    prefill_lookahead: Count
    retention_interval: Count | None
    partial_hits: bool
    max_model_len: Positive
    max_in_flight_tokens: Positive | None
    context_parallel: Positive
    watermark: Annotated[float, Meta(extra_json_schema={"minimum": 0, "maximum": 1})] = 0.0
    shared_prefix_checkpoint: bool = False
    bugs: list[str] = []
    hash_seed: str = SEED
    zeroing: bool = False
    offloads: bool = False


class ExtraKeys(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Everything besides its tokens that identifies a request's prefix (version 2).

    Attributes:
      lora: `[name, path]` of the adapter, or None.
      multimodal: `[identifier, offset, length]` of each item, offsets and lengths in tokens, in order of offset.
      salt: cache salt, or None.
      embeds: hex of the bytes of each token's prompt embedding, or None.
    """

    lora: Annotated[list[str], Meta(extra_json_schema={"minItems": 2, "maxItems": 2})] | None = None
    multimodal: list[tuple[str, Count, Positive]] = []
    salt: str | None = None
    embeds: list[Annotated[str, Meta(extra_json_schema={"pattern": "^([0-9a-f]{2})+$"})]] | None = None


class Hit(msgspec.Struct, forbid_unknown_fields=True):
    """Answer to `lookup`: `hit` tokens, the blocks per group, and the longest single-group hit when it is longer."""

    hit: Count
    blocks: Rows
    shared_prefix: Count


class ConnectorHit(Hit, forbid_unknown_fields=True):
    """Answer to `connector_lookup` (version 4).

    Attributes:
      diverged: whether some group lacks the end of the hit, which a load has to bring.
      hits: tokens that each group finds by itself.
    """

    diverged: bool
    hits: list[Count]


class Truncated(msgspec.Struct, forbid_unknown_fields=True):
    """Answer to `truncate` (version 4): the blocks per group that are left."""

    blocks: Rows


class Allocation(msgspec.Struct, forbid_unknown_fields=True):
    """Answer to `allocate`: the newly obtained blocks per group, or None when refused."""

    blocks: Rows | None


class CacheEvent(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """One KV event.

    Attributes:
      type: `stored`, `removed`, or (version 2) `cleared`.
      group: the group; -1 for `cleared`.
      num_blocks: blocks registered by this event (0 is possible), or 1 for `removed`.
      block_size: tokens per block of a `stored` event.
      tokens: the whole span of tokens a `stored` event looked at.
      keys: (version 2) first 8 bytes, in hex, of the chain hash of each block stored or removed.
      parent: (version 2) the same of the block before the first one stored, "" for none.
      medium: (version 3) medium of the blocks stored or removed, `GPU` for the engine's own pool.
      lora_name: (version 3) name of the adapter of the request that stored them, "" for none.
      extra_keys: (version 3) of each key stored, what it covers besides tokens, untagged, or None.
      spec_kind: (version 3) kind of the group's spec, in vLLM's words (`KVCacheSpecKind`).
      window: (version 3) the group's window in tokens, 0 for none.
      session: (version 3) session of the request that stored them, "" for none.
      lookahead: (version 3) for each key stored, the tokens after its block that it covers; empty without any.
    """

    type: str
    group: Count = -1
    num_blocks: Count = 0
    block_size: Positive = 0
    tokens: list[Token] | None = None
    keys: list[Key] | None = None
    parent: Key | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[str | tuple[str, int]] | None] | None = None
    spec_kind: str | None = None
    window: Count | None = None
    session: str | None = None
    lookahead: list[list[Token]] | None = None


class CacheState(msgspec.Struct, forbid_unknown_fields=True):
    """Answer to `state`.

    Attributes:
      free: the free queue, next to be handed out first.
      refs: reference count of each block that has one, by block id.
      rows: block ids per group of each request that has any.
      cached: by block id, `[group, tokens covered, first 8 bytes of the chain hash in hex]` of its primary key.
    """

    free: list[Count]
    refs: Annotated[dict[str, Count], ById]
    rows: dict[str, Rows]
    cached: Annotated[dict[str, tuple[Count, Count, Key]], ById]


class Reset(msgspec.Struct, forbid_unknown_fields=True):
    """Answer to `reset`."""

    ok: bool


class Digest(msgspec.Struct, forbid_unknown_fields=True):
    """Answer to `digest` (version 3): SHA-256, in hex, of the state as `state_digest` writes it."""

    digest: Annotated[str, Meta(extra_json_schema={"pattern": "^[0-9a-f]{64}$"})]


Offer: TypeAlias = tuple[Count, Count, Count]
"""A recurrent state that is offered for offloading: group, block, tokens that it stands for."""

Offers: TypeAlias = dict[str, list[Offer]]
"""States that are offered, by request."""

Answer: TypeAlias = (
    Hit
    | Truncated
    | Allocation
    | Reset
    | CacheState
    | Digest
    | Offers
    | list[Offer]
    | list[CacheEvent]
    | list[tuple[int, int]]
    | list[int]
    | None
)
"""An engine's answer to one operation; None for operations that answer nothing."""


class _Op(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True, tag_field="op", gc=False):
    pass


class StepOp(_Op, tag="step"):
    """A new scheduling step begins."""


class RequestOp(_Op, tag="request"):
    """A request arrives with this prompt; `extra` from version 2 on.

    Version 3: `keys`, the prefix keys of its hash blocks in hex, where they are given and not computed; `session`,
    which its events name; `report`, its hits are published as events; tokens may be negative.
    """

    id: str
    tokens: Annotated[list[Token], NotEmpty]
    extra: ExtraKeys | None = None
    keys: list[WholeKey] | None = None
    session: str | None = None
    report: Annotated[str, Meta(extra_json_schema={"const": FULL})] | None = None


class LookupOp(_Op, tag="lookup"):
    """The longest common cache hit of a waiting request; `limit` (version 3): it is not longer, in tokens."""

    id: str
    limit: Count | None = None
    want: Hit | None = None


class ConnectorLookupOp(_Op, tag="connector_lookup"):
    """The hit of a waiting request whose groups a connector may complete (version 4).

    `limit`: as of `lookup`. vLLM 0.33 `get_computed_blocks_for_connector`.
    """

    id: str
    limit: Count | None = None
    want: ConnectorHit | None = None


class TruncateOp(_Op, tag="truncate"):
    """The rows of a hit up to its first `tokens` tokens (version 4, `truncate_computed_blocks`); changes nothing."""

    rows: Rows
    tokens: Count
    want: Truncated | None = None


class AllocateOp(_Op, tag="allocate"):
    """A request gets blocks for its next tokens (`KVCacheManager.allocate_slots`).

    Version 3: `rows`, the hit that is adopted where it is not what the lookup just before found; `waiting`, the
    request's status is WAITING or PREEMPTED, and `scheduled`, requests are scheduled already: then the watermark holds;
    `encoder`, tokens of an encoder's output that want slots in the groups of cross attention (`num_encoder_tokens`);
    `loaded`, groups whose blocks for external tokens are not to be zeroed, since a load writes them.
    """

    id: str
    new: Count
    hit: Count
    lookahead: Count
    external: Count
    delay: bool
    must_fit: bool
    reserved: Count
    in_flight: Count
    shared_prefix: Count | None = None
    rows: Rows | None = None
    waiting: bool | None = None
    scheduled: bool | None = None
    encoder: Count | None = None
    loaded: list[Count] = []
    want: Allocation | None = None


class AdvanceOp(_Op, tag="advance"):
    """`tokens` more tokens are computed."""

    id: str
    tokens: Count


class ComputedOp(_Op, tag="computed"):
    """`tokens` tokens are computed in all (version 3): more than there are, or fewer than before."""

    id: str
    tokens: Count


class AppendOp(_Op, tag="append"):
    """Generated tokens are appended; `keys` (version 3) are given for a request that came with keys."""

    id: str
    tokens: list[Token]
    keys: list[WholeKey] | None = None


class ResumeOp(_Op, tag="resume"):
    """A streaming session goes on (version 3): its first `keep` tokens stay, and `tokens` follow.

    `prompt`: tokens of its prompt from now on; `extra`: everything besides tokens that identifies its prefix from now
    on, None for what it was; `keys`: those of its hash blocks from the first that is not whole in the tokens kept.
    """

    id: str
    keep: Count
    tokens: list[Token]
    prompt: Positive
    extra: ExtraKeys | None = None
    keys: list[WholeKey] | None = None


class CommitOp(_Op, tag="commit"):
    """The first `tokens` tokens may be registered in the prefix cache."""

    id: str
    tokens: Count


class RetireOp(_Op, tag="retire"):
    """Blocks that no token from `tokens` on reads are given back (version 3, `remove_skipped_blocks`)."""

    id: str
    tokens: Count


class PopOp(_Op, tag="pop"):
    """As `free`, but the blocks are given back by a later `release` (version 3, `pop_blocks_for_free`)."""

    id: str


class ReleaseOp(_Op, tag="release"):
    """These blocks lose a reference each, in this order (version 3, `BlockPool.free_blocks`)."""

    blocks: list[Count]


class HoldOp(_Op, tag="hold"):
    """These blocks gain a reference each (version 3, `BlockPool.touch`)."""

    blocks: list[Count]


class FreeOp(_Op, tag="free"):
    """The request finished or is preempted: its row is freed."""

    id: str


class DropOp(_Op, tag="drop"):
    """A waiting request is forgotten."""

    id: str


class EvictOp(_Op, tag="evict"):
    """Drops the keys of these blocks."""

    blocks: list[Count]


class CopiesOp(_Op, tag="copies"):
    """Drains pending copy-on-write copies and gives back the references they held.

    With `hold` (version 3) the references stay until a `release` of both ends of each.
    """

    hold: bool = False
    want: list[tuple[Count, Count]] | None = None


class ZerosOp(_Op, tag="zeros"):
    """Drains the blocks that are to be zeroed (version 3, `take_new_block_ids`)."""

    want: list[Count] | None = None


class UnwrittenOp(_Op, tag="unwritten"):
    """A request's blocks from `tokens` on were not written by a load: they are to be zeroed after all (version 3)."""

    id: str
    tokens: Count


class OffloadsOp(_Op, tag="offloads"):
    """Drains the states that a connector is offered (version 3, `take_boundary_state_offloads`)."""

    want: Offers | None = None


class FinalizeOp(_Op, tag="finalize"):
    """A request is about to end: the tail of its prompt is offered, if that is where its states still are (version 3).

    `in_flight`: tokens of its steps that have not come back. vLLM 0.33 `finalize_partial_tail_offloads`.
    """

    id: str
    in_flight: Count = 0
    want: list[Offer] | None = None


class ResetOp(_Op, tag="reset"):
    """Resets the prefix cache."""

    want: Reset | None = None


class EventsOp(_Op, tag="events"):
    """Drains KV events."""

    want: list[CacheEvent] | None = None


class StateOp(_Op, tag="state"):
    """Everything."""

    want: CacheState | None = None


class DigestOp(_Op, tag="digest"):
    """Everything, in 32 bytes (version 3)."""

    want: Digest | None = None


class EndOp(_Op, tag="end"):
    """The log ends here, though the cache went on (version 3): `reason` says why."""

    reason: Annotated[str, Meta(extra_json_schema={"minLength": 1})]


Operation: TypeAlias = (
    StepOp
    | RequestOp
    | LookupOp
    | ConnectorLookupOp
    | TruncateOp
    | AllocateOp
    | AdvanceOp
    | ComputedOp
    | AppendOp
    | ResumeOp
    | CommitOp
    | RetireOp
    | FreeOp
    | PopOp
    | ReleaseOp
    | HoldOp
    | DropOp
    | EvictOp
    | CopiesOp
    | ZerosOp
    | UnwrittenOp
    | OffloadsOp
    | FinalizeOp
    | ResetOp
    | EventsOp
    | StateOp
    | DigestOp
    | EndOp
)


LIVE_OPERATIONS = (
    *(ComputedOp, ResumeOp, RetireOp, PopOp, ReleaseOp, HoldOp, ZerosOp, UnwrittenOp),
    *(OffloadsOp, FinalizeOp, DigestOp, EndOp),
)
"""Operations that version 3 adds."""

CONNECTOR_OPERATIONS = (ConnectorLookupOp, TruncateOp)
"""Operations that version 4 adds."""


LIVE_FIELDS = ("keys", "session", "report", "limit", "rows", "waiting", "scheduled", "encoder", "loaded", "hold")
"""Fields of operations that version 3 adds."""


EVENT_FIELDS = ("keys", "parent", "medium", "lora_name", "extra_keys", "spec_kind", "window", "session", "lookahead")
"""Fields of events that a log may leave out: the first two from version 2 on, the others from version 3 on."""


def state_digest(state: CacheState) -> Digest:
    """The digest of a state: of its JSON form without spaces, names of objects in order of their text."""
    return Digest(hashlib.sha256(msgspec.json.encode(state, order="deterministic")).hexdigest())
