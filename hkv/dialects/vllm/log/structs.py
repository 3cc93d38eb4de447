"""The operation log: header, operations and answers as typed values; `docs/oplog.md` defines the format."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta

from hkv.limits import MAX_TOKENS

# What only the JSON schema says of a value: decoding leaves ranges to `file.py`, which names the field and the value.
Count: TypeAlias = Annotated[int, Meta(extra_json_schema={"minimum": 0, "maximum": MAX_TOKENS})]
Positive: TypeAlias = Annotated[int, Meta(extra_json_schema={"minimum": 1, "maximum": MAX_TOKENS})]
Key: TypeAlias = Annotated[str, Meta(extra_json_schema={"pattern": "^[0-9a-f]*$"})]
ById = Meta(extra_json_schema={"propertyNames": {"pattern": "^[0-9]+$"}})
NotEmpty = Meta(extra_json_schema={"minItems": 1})

Rows: TypeAlias = list[list[Count]]
"""Block ids of one request, per group."""


class Header(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """The first line: the configuration. Attributes as `hkv.dialects.vllm.config.VllmConfig` explains them.

    Version 2 adds `watermark`, `shared_prefix_checkpoint`, `bugs`, and the kinds `mla` and `opaque`; a version 1 header
    must not use them.
    """

    oplog: Annotated[int, Meta(extra_json_schema={"enum": [1, 2]})]
    dialect: Annotated[str, Meta(extra_json_schema={"const": "vllm-0.33"})]
    feature: Annotated[str, Meta(extra_json_schema={"minLength": 1})]
    num_blocks: Positive
    groups: Annotated[list[Annotated[dict[str, Any], Meta(extra_json_schema={"$ref": "#/$defs/group"})]], NotEmpty]
    hash: Annotated[str, Meta(extra_json_schema={"enum": ["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"]})]
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
    """

    type: str
    group: Count = -1
    num_blocks: Count = 0
    block_size: Positive = 0
    tokens: list[Count] | None = None
    keys: list[Key] | None = None
    parent: Key | None = None


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


Answer: TypeAlias = Hit | Allocation | Reset | CacheState | list[CacheEvent] | list[tuple[int, int]] | None
"""An engine's answer to one operation; None for operations that answer nothing."""


class _Op(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True, tag_field="op"):
    pass


class StepOp(_Op, tag="step"):
    """A new scheduling step begins."""


class RequestOp(_Op, tag="request"):
    """A request arrives with this prompt; `extra` only in version 2."""

    id: str
    tokens: Annotated[list[Count], NotEmpty]
    extra: ExtraKeys | None = None


class LookupOp(_Op, tag="lookup"):
    """The longest common cache hit of a waiting request."""

    id: str
    want: Hit | None = None


class AllocateOp(_Op, tag="allocate"):
    """A request gets blocks for its next tokens (`KVCacheManager.allocate_slots`)."""

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
    want: Allocation | None = None


class AdvanceOp(_Op, tag="advance"):
    """`tokens` more tokens are computed."""

    id: str
    tokens: Count


class AppendOp(_Op, tag="append"):
    """Generated tokens are appended."""

    id: str
    tokens: list[Count]


class CommitOp(_Op, tag="commit"):
    """The first `tokens` tokens may be registered in the prefix cache."""

    id: str
    tokens: Count


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
    """Drains pending copy-on-write copies and gives back the references they held."""

    want: list[tuple[Count, Count]] | None = None


class ResetOp(_Op, tag="reset"):
    """Resets the prefix cache."""

    want: Reset | None = None


class EventsOp(_Op, tag="events"):
    """Drains KV events."""

    want: list[CacheEvent] | None = None


class StateOp(_Op, tag="state"):
    """Everything."""

    want: CacheState | None = None


Operation: TypeAlias = (
    StepOp
    | RequestOp
    | LookupOp
    | AllocateOp
    | AdvanceOp
    | AppendOp
    | CommitOp
    | FreeOp
    | DropOp
    | EvictOp
    | CopiesOp
    | ResetOp
    | EventsOp
    | StateOp
)
