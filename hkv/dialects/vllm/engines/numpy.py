"""The reference as an engine: `reference.dialects.vllm` behind the operations of the log format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hkv.dialects.vllm.engines.engine import describe_removed, describe_stored
from hkv.dialects.vllm.log.configuration import to_config
from hkv.dialects.vllm.log.structs import (
    AllocateOp,
    Allocation,
    CacheEvent,
    CacheState,
    ConnectorHit,
    ExtraKeys,
    Header,
    Hit,
    Offer,
    Offers,
    ResumeOp,
    Rows,
)
from hkv.errors import ConfigError
from hkv.keys.chained import PLAIN, PrefixIdentity
from hkv.version import check_reference


class NumpyEngine:
    """The reference. Implements `hkv.dialects.vllm.engines.engine.KeyedEngine`.

    Args:
      header: the configuration, as a log's first line.

    Attributes:
      manager: the reference's own object, for those who want to look inside.

    Raises:
      HKVError: a configuration the dialect forbids, or a foreign package called `reference`.
    """

    def __init__(self, header: Header) -> None:
        check_reference()
        from reference.dialects.vllm.manager import Manager

        self.manager = Manager(to_config(header))
        self._version = header.oplog
        self._live = header.oplog >= 3

    @property
    def _operations(self) -> Any:
        """`reference.dialects.vllm.live`; not an attribute, as engines are copied and modules cannot be."""
        from reference.dialects.vllm import live

        return live

    def step(self) -> None:
        """A new scheduling step begins."""
        self.manager.step()

    def request(
        self,
        id: str,
        tokens: Sequence[int],
        extra: ExtraKeys | None,
        keys: Sequence[str] | None = None,
        session: str = "",
        report: str = "",
    ) -> None:
        """A request arrives with this prompt, and with prefix keys where they are given."""
        self.manager.request(id, tokens, PLAIN if extra is None else identity_of(extra), keys, session, bool(report))

    def request_keyed(self, id: str, num_tokens: int, keys: Sequence[int]) -> None:
        """A request arrives of which only length and prefix keys are known; no events are recorded from then on."""
        self.manager.request_keyed(id, num_tokens, keys)

    def extend(self, id: str, tokens: int) -> None:
        """`tokens` generated tokens are appended to a keyed request."""
        self.manager.extend(id, tokens)

    def lookup(self, id: str, limit: int | None = None) -> Hit:
        """The longest common cache hit of a waiting request, of at most `limit` tokens."""
        found = self.manager.lookup(id, limit)
        return Hit(found.hit, found.blocks, found.shared_prefix)

    def connector_lookup(self, id: str, limit: int | None = None) -> ConnectorHit:
        """The hit of a waiting request whose groups a connector may complete."""
        from reference.dialects.vllm.connector import connector_lookup

        found, diverged, hits = connector_lookup(self.manager, id, limit)
        return ConnectorHit(found.hit, found.blocks, found.shared_prefix, diverged, hits)

    def truncate(self, rows: Rows, tokens: int) -> Rows:
        """The rows of a hit up to its first `tokens` tokens."""
        from reference.dialects.vllm.connector import truncate

        return truncate(self.manager, rows, tokens)

    def allocate(self, operation: AllocateOp) -> Allocation:
        """A request gets blocks for its next tokens, or is refused."""
        blocks = self.manager.allocate(
            operation.id,
            operation.new,
            hit=operation.hit,
            lookahead=operation.lookahead,
            external=operation.external,
            delay=operation.delay,
            must_fit=operation.must_fit,
            reserved=operation.reserved,
            in_flight=operation.in_flight,
            shared_prefix=operation.shared_prefix,
            rows=operation.rows,
            waiting=operation.waiting,
            scheduled=operation.scheduled,
            encoder=operation.encoder or 0,
            loaded=operation.loaded,
        )
        return Allocation(blocks)

    def advance(self, id: str, tokens: int) -> None:
        """`tokens` more tokens are computed."""
        self.manager.advance(id, tokens)

    def computed(self, id: str, tokens: int) -> None:
        """`tokens` tokens are computed in all."""
        self._operations.computed(self.manager, id, tokens)

    def append(self, id: str, tokens: Sequence[int], keys: Sequence[str] = ()) -> None:
        """Generated tokens are appended."""
        self.manager.append(id, tokens, keys)

    def resume(self, operation: ResumeOp) -> None:
        """A streaming session goes on."""
        extra = operation.extra
        self._operations.resume(
            self.manager,
            operation.id,
            operation.keep,
            operation.tokens,
            operation.prompt,
            None if extra is None else identity_of(extra),
            operation.keys or (),
        )

    def commit(self, id: str, tokens: int) -> None:
        """The first `tokens` tokens may be registered in the prefix cache."""
        self.manager.commit(id, tokens, checked=not self._live)

    def retire(self, id: str, tokens: int) -> None:
        """Blocks that no token from `tokens` on reads are given back."""
        self._operations.retire(self.manager, id, tokens)

    def pop(self, id: str) -> None:
        """The request's rows end; their blocks stay referenced."""
        self._operations.pop(self.manager, id)

    def release(self, blocks: Sequence[int]) -> None:
        """These blocks lose a reference each."""
        self._operations.release(self.manager, blocks)

    def hold(self, blocks: Sequence[int]) -> None:
        """These blocks gain a reference each."""
        self._operations.hold(self.manager, blocks)

    def zeros(self) -> list[int]:
        """Drains the blocks that are to be zeroed."""
        return self._operations.zeros(self.manager)

    def unwritten(self, id: str, tokens: int) -> None:
        """The request's blocks from `tokens` on are to be zeroed after all."""
        self._operations.unwritten(self.manager, id, tokens)

    def offloads(self) -> Offers:
        """Drains the states that a connector is offered."""
        return self._operations.offloads(self.manager)

    def finalize(self, id: str, in_flight: int) -> list[Offer]:
        """The request is about to end: the ends of its prompt inside blocks are offered."""
        return self._operations.finalize(self.manager, id, in_flight)

    def free(self, id: str) -> None:
        """The request finished or is preempted."""
        self.manager.free(id)

    def drop(self, id: str) -> None:
        """A waiting request is forgotten."""
        self.manager.drop(id)

    def evict(self, blocks: Sequence[int]) -> None:
        """Drops the keys of these blocks."""
        self.manager.evict(blocks)

    def copies(self, hold: bool = False) -> list[tuple[int, int]]:
        """Drains pending copies and gives back the references they held, unless these are to stay."""
        return self.manager.copies(hold)

    def pending_copies(self) -> list[list[tuple[int, int]]]:
        """Copies that `copies` would drain, (source, target), a list a group."""
        return [list(kind.copies) for kind in self.manager.cache.kinds]

    def reset(self) -> bool:
        """Resets the prefix cache."""
        return self.manager.reset()

    def num_free(self) -> int:
        """Blocks in the free queue."""
        return self.manager.num_free()

    @property
    def evictions(self) -> int:
        """Cached blocks handed out to another use so far."""
        return self.manager.evictions

    def absence(self, group: int, key: int) -> str:
        """State of a prefix in a group: see `hkv.dialects.vllm.schedule.diagnosis.MissDiagnosis`."""
        return self.manager.absence(group, key)

    def eviction(self, group: int, key: int) -> tuple[int, int] | None:
        """Step and group of an eviction: see `hkv.dialects.vllm.schedule.diagnosis.MissDiagnosis`."""
        return self.manager.eviction(group, key)

    def events(self) -> list[CacheEvent]:
        """Drains KV events; version 1 of the log format knows neither keys nor `cleared`."""
        from reference.state.events import Cleared

        events = self.manager.events()
        return [self._event(event) for event in events if self._version > 1 or not isinstance(event, Cleared)]

    def _event(self, event: object) -> CacheEvent:
        from reference.state.events import Removed, Stored

        with_keys = self._version > 1
        match event:
            case Stored():
                stored = CacheEvent(
                    type="stored",
                    group=event.group,
                    num_blocks=len(event.chains),
                    block_size=event.block_size,
                    tokens=list(event.tokens),
                    keys=[key_text(chain) for chain in event.chains] if with_keys else None,
                    parent=("" if event.parent is None else key_text(event.parent)) if with_keys else None,
                )
                if not self._live:
                    return stored
                config = self.manager.config
                return describe_stored(stored, config, event.identity, event.session, event.ends, event.ahead)
            case Removed():
                keys = [key_text(event.chain)] if with_keys else None
                removed = CacheEvent(type="removed", group=event.group, num_blocks=1, keys=keys)
                return describe_removed(removed) if self._live else removed
            case _:
                return CacheEvent(type="cleared")

    def state(self) -> CacheState:
        """State of the cache, as far as engines are compared."""
        manager = self.manager
        pool = manager.pool
        rows = {id: manager.rows(id) for id in manager.requests}
        return CacheState(
            free=list(pool.free),
            refs={str(block): count for block, count in enumerate(pool.refs) if count},
            rows={id: blocks for id, blocks in rows.items() if any(blocks)},
            cached={
                str(block): (key[0], pool.covered[block], key_text(key[1]))
                for block, key in enumerate(pool.primary)
                if key is not None
            },
        )


def identity_of(extra: ExtraKeys) -> PrefixIdentity:
    """Identity of a request's prefix besides its tokens, from the form in which a log writes it.

    Raises:
      HKVError: an adapter without name and path, or embeddings that are not hex.
    """
    if extra.lora is not None and len(extra.lora) != 2:
        raise ConfigError("extra.lora", extra.lora, "[name, path] of the adapter")
    try:
        embeds = None if extra.embeds is None else tuple(bytes.fromhex(text) for text in extra.embeds)
    except ValueError:
        raise ConfigError("extra.embeds", extra.embeds, "hex digits, two a byte") from None
    return PrefixIdentity(
        lora=None if extra.lora is None else (extra.lora[0], extra.lora[1]),
        multimodal=tuple(extra.multimodal),
        salt=extra.salt,
        embeds=embeds,
    )


def key_text(chain: object) -> str:
    """The first 8 bytes of a chain key in hex; of an int key, its low 8 bytes, big-endian."""
    if isinstance(chain, bytes):
        return chain[:8].hex()
    assert isinstance(chain, int)
    return f"{chain & (1 << 64) - 1:016x}"
