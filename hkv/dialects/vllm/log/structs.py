"""The operation log: header, operations and answers as typed values; `docs/oplog.md` defines the format."""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, ClassVar, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from hkv.contract.log import later_fields
from hkv.keys.chained import SEED
from hkv.limits import MAX_TOKENS

# What only the JSON schema says of a value: decoding leaves ranges to `configuration.py`, which names the field.
Count: TypeAlias = Annotated[int, Meta(extra_json_schema={"minimum": 0, "maximum": MAX_TOKENS})]
Positive: TypeAlias = Annotated[int, Meta(extra_json_schema={"minimum": 1, "maximum": MAX_TOKENS})]
Token: TypeAlias = Annotated[int, Meta(extra_json_schema={"minimum": -MAX_TOKENS - 1, "maximum": MAX_TOKENS})]
Key: TypeAlias = Annotated[str, Meta(extra_json_schema={"pattern": "^[0-9a-f]*$"})]
ById = Meta(extra_json_schema={"propertyNames": {"pattern": "^[0-9]+$"}})
NotEmpty = Meta(extra_json_schema={"minItems": 1})
WholeKey: TypeAlias = Annotated[str, Meta(extra_json_schema={"pattern": "^([0-9a-f]{2})+$"})]

T = TypeVar("T")
Since2: TypeAlias = Annotated[T, Meta(extra={"since": 2})]
"""A field that version 2 of the format adds."""
Since3: TypeAlias = Annotated[T, Meta(extra={"since": 3})]

FULL = "full"
"""The report mode in which hits are published as events (vLLM 0.33 `kv_cache_report_mode`)."""

Rows: TypeAlias = list[list[Count]]
"""Block ids of one request, per group."""


class Header(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """The first line: the configuration. Attributes as `hkv.dialects.vllm.config.VllmConfig` explains them.

    Version 2 adds the kinds `mla` and `opaque`; a version 1 header must not use them. Version 3 adds the hash `given`,
    and of windows `extra_retained_tokens`.
    """

    oplog: Annotated[int, Meta(extra_json_schema={"enum": [1, 2, 3, 4]})]
    dialect: Annotated[str, Meta(extra_json_schema={"enum": ["vllm-0.33", "vllm-0.32"]})]
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
    watermark: Since2[Annotated[float, Meta(extra_json_schema={"minimum": 0, "maximum": 1})]] = 0.0
    shared_prefix_checkpoint: Since2[bool] = False
    bugs: Since2[list[str]] = []
    hash_seed: Since3[str] = SEED
    zeroing: Since3[bool] = False
    offloads: Since3[bool] = False


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
    """Answer to `lookup`: `hit` tokens, the blocks per group, and what the search came to when it is longer."""

    hit: Count
    blocks: Rows
    shared_prefix: Count


class ConnectorHit(Hit, forbid_unknown_fields=True):
    """Answer to `connector_lookup`.

    Attributes:
      diverged: whether some group lacks the end of the hit, which a load has to bring.
      hits: tokens that each group finds by itself.
    """

    diverged: bool
    hits: list[Count]


class Truncated(msgspec.Struct, forbid_unknown_fields=True):
    """Answer to `truncate`: the blocks per group that are left."""

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
      keys: first 8 bytes, in hex, of the chain hash of each block stored or removed.
      parent: the same of the block before the first one stored, "" for none.
      medium: medium of the blocks stored or removed, `GPU` for the engine's own pool.
      lora_name: name of the adapter of the request that stored them, "" for none.
      extra_keys: of each key stored, what it covers besides tokens, untagged, or None.
      spec_kind: kind of the group's spec, in vLLM's words (`KVCacheSpecKind`).
      window: the group's window in tokens, 0 for none.
      session: session of the request that stored them, "" for none.
      lookahead: for each key stored, the tokens after its block that it covers; empty without any.
    """

    type: str
    group: Count = -1
    num_blocks: Count = 0
    block_size: Positive = 0
    tokens: list[Token] | None = None
    keys: Since2[list[Key] | None] = None
    parent: Since2[Key | None] = None
    medium: Since3[str | None] = None
    lora_name: Since3[str | None] = None
    extra_keys: Since3[list[list[str | tuple[str, int]] | None] | None] = None
    spec_kind: Since3[str | None] = None
    window: Since3[Count | None] = None
    session: Since3[str | None] = None
    lookahead: Since3[list[list[Token]] | None] = None


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
    """Answer to `digest`: SHA-256, in hex, of the state as `state_digest` writes it."""

    digest: Annotated[str, Meta(extra_json_schema={"pattern": "^[0-9a-f]{64}$"})]


Offer: TypeAlias = tuple[Count, Count, Count]
"""A recurrent state that is offered for offloading: group, block, tokens that it stands for."""

Offers: TypeAlias = dict[str, list[Offer]]
"""States that are offered, by request."""

Answer: TypeAlias = Hit | Truncated | Allocation | Reset | CacheState | Digest | Offers | list[Any] | None
"""An engine's answer to one operation; None for operations that answer nothing."""


class Operation(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True, tag_field="op", gc=False):
    """An operation, a method of its name of an engine (`hkv.dialects.vllm.engines.engine.Engine`).

    The method takes the fields in order; those of `Since3` by name, and only where a log has them.

    Attributes:
      since: version of the format that adds it.
      whole: whether the method takes the operation itself.
    """

    since: ClassVar[int] = 1
    whole: ClassVar[bool] = False


class LiveOperation(Operation):
    """An operation of live schedulers, which version 3 adds."""

    since: ClassVar[int] = 3


class ConnectorOperation(Operation):
    """An operation of connectors, which version 4 adds."""

    since: ClassVar[int] = 4


class StepOp(Operation, tag="step"):
    """A new scheduling step begins."""


class RequestOp(Operation, tag="request"):
    """A request arrives with this prompt; `extra` from version 2 on.

    Version 3: `keys`, the prefix keys of its hash blocks in hex, where they are given and not computed; `session`,
    which its events name; `report`, its hits are published as events; tokens may be negative.
    """

    id: str
    tokens: Annotated[list[Token], NotEmpty]
    extra: Since2[ExtraKeys | None] = None
    keys: Since3[list[WholeKey] | None] = None
    session: Since3[str | None] = None
    report: Since3[Annotated[str, Meta(extra_json_schema={"const": FULL})] | None] = None


class LookupOp(Operation, tag="lookup"):
    """The longest common cache hit of a waiting request; `limit`: it is not longer, in tokens."""

    id: str
    limit: Since3[Count | None] = None
    want: Hit | None = None


class ConnectorLookupOp(ConnectorOperation, tag="connector_lookup"):
    """The hit of a waiting request whose groups a connector may complete.

    `limit`: as of `lookup`. vLLM 0.33 `get_computed_blocks_for_connector`.
    """

    id: str
    limit: Count | None = None
    want: ConnectorHit | None = None


class TruncateOp(ConnectorOperation, tag="truncate"):
    """The rows of a hit up to its first `tokens` tokens (`truncate_computed_blocks`); changes nothing."""

    rows: Rows
    tokens: Count
    want: Truncated | None = None


class AllocateOp(Operation, tag="allocate"):
    """A request gets blocks for its next tokens (`KVCacheManager.allocate_slots`).

    `rows`, the hit that is adopted where it is not what the lookup just before found; `waiting`, the
    request's status is WAITING or PREEMPTED, and `scheduled`, requests are scheduled already: then the watermark holds;
    `encoder`, tokens of an encoder's output that want slots in the groups of cross attention (`num_encoder_tokens`);
    `loaded`, groups whose blocks for external tokens are not to be zeroed, since a load writes them.
    """

    whole: ClassVar[bool] = True

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
    rows: Since3[Rows | None] = None
    waiting: Since3[bool | None] = None
    scheduled: Since3[bool | None] = None
    encoder: Since3[Count | None] = None
    loaded: Since3[list[Count]] = []
    want: Allocation | None = None


class AdvanceOp(Operation, tag="advance"):
    """`tokens` more tokens are computed."""

    id: str
    tokens: Count


class ComputedOp(LiveOperation, tag="computed"):
    """`tokens` tokens are computed in all: more than there are, or fewer than before."""

    id: str
    tokens: Count


class AppendOp(Operation, tag="append"):
    """Generated tokens are appended; `keys` are given for a request that came with keys."""

    id: str
    tokens: list[Token]
    keys: Since3[list[WholeKey] | None] = None


class ResumeOp(LiveOperation, tag="resume"):
    """A streaming session goes on: its first `keep` tokens stay, and `tokens` follow.

    `prompt`: tokens of its prompt from now on; `extra`: everything besides tokens that identifies its prefix from now
    on, None for what it was; `keys`: those of its hash blocks from the first that is not whole in the tokens kept.
    """

    whole: ClassVar[bool] = True

    id: str
    keep: Count
    tokens: list[Token]
    prompt: Positive
    extra: ExtraKeys | None = None
    keys: list[WholeKey] | None = None


class CommitOp(Operation, tag="commit"):
    """The first `tokens` tokens may be registered in the prefix cache."""

    id: str
    tokens: Count


class RetireOp(LiveOperation, tag="retire"):
    """Blocks that no token from `tokens` on reads are given back (`remove_skipped_blocks`)."""

    id: str
    tokens: Count


class FreeOp(Operation, tag="free"):
    """The request finished or is preempted: its row is freed."""

    id: str


class PopOp(LiveOperation, tag="pop"):
    """As `free`, but the blocks are given back by a later `release` (`pop_blocks_for_free`)."""

    id: str


class ReleaseOp(LiveOperation, tag="release"):
    """These blocks lose a reference each, in this order (`BlockPool.free_blocks`)."""

    blocks: list[Count]


class HoldOp(LiveOperation, tag="hold"):
    """These blocks gain a reference each (`BlockPool.touch`)."""

    blocks: list[Count]


class DropOp(Operation, tag="drop"):
    """A waiting request is forgotten."""

    id: str


class EvictOp(Operation, tag="evict"):
    """Drops the keys of these blocks."""

    blocks: list[Count]


class CopiesOp(Operation, tag="copies"):
    """Drains pending copy-on-write copies and gives back the references they held.

    With `hold` the references stay until a `release` of both ends of each.
    """

    hold: Since3[bool] = False
    want: list[tuple[Count, Count]] | None = None


class ZerosOp(LiveOperation, tag="zeros"):
    """Drains the blocks that are to be zeroed (`take_new_block_ids`)."""

    want: list[Count] | None = None


class UnwrittenOp(LiveOperation, tag="unwritten"):
    """A request's blocks from `tokens` on were not written by a load: they are to be zeroed after all."""

    id: str
    tokens: Count


class OffloadsOp(LiveOperation, tag="offloads"):
    """Drains the states that a connector is offered (`take_boundary_state_offloads`)."""

    want: Offers | None = None


class FinalizeOp(LiveOperation, tag="finalize"):
    """A request is about to end: the tail of its prompt is offered, if that is where its states still are.

    `in_flight`: tokens of its steps that have not come back. vLLM 0.33 `finalize_partial_tail_offloads`.
    """

    id: str
    in_flight: Count = 0
    want: list[Offer] | None = None


class ResetOp(Operation, tag="reset"):
    """Resets the prefix cache."""

    want: Reset | None = None


class EventsOp(Operation, tag="events"):
    """Drains KV events."""

    want: list[CacheEvent] | None = None


class StateOp(Operation, tag="state"):
    """Everything."""

    want: CacheState | None = None


class DigestOp(LiveOperation, tag="digest"):
    """Everything, in 32 bytes."""

    want: Digest | None = None


class EndOp(LiveOperation, tag="end"):
    """The log ends here, though the cache went on: `reason` says why."""

    reason: Annotated[str, Meta(extra_json_schema={"minLength": 1})]


OPERATIONS: tuple[type[Operation], ...] = tuple(each for name, each in tuple(globals().items()) if name.endswith("Op"))
"""The operations."""

EVENT_FIELDS = tuple(name for name, _ in later_fields(CacheEvent))
"""Fields of events that a log may leave out."""


def state_digest(state: CacheState) -> Digest:
    """The digest of a state: of its JSON form without spaces, names of objects in order of their text."""
    return Digest(hashlib.sha256(msgspec.json.encode(state, order="deterministic")).hexdigest())
