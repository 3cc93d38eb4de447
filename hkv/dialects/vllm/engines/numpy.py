"""The reference as an engine: `reference.dialects.vllm` behind the operations of the log format."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hkv.contract.events import DEVICE
from hkv.dialects.vllm.engines.engine import describe_stored, told
from hkv.dialects.vllm.log import structs as oplog
from hkv.dialects.vllm.log.configuration import to_config
from hkv.errors import ConfigError
from hkv.keys.chained import PLAIN, PrefixIdentity
from hkv.version import check_reference


def _of_manager(name: str) -> Callable[..., Any]:
    """An operation that the reference's manager has as a method of that name."""

    def perform(engine: NumpyEngine, *arguments: Any, **named: Any) -> Any:
        return getattr(engine.manager, name)(*arguments, **named)

    return perform


def _of_live(name: str) -> Callable[..., Any]:
    """An operation of live schedulers, a function of that name in `reference.dialects.vllm.live`."""

    def perform(engine: NumpyEngine, *arguments: Any) -> Any:
        from reference.dialects.vllm import live

        return getattr(live, name)(engine.manager, *arguments)

    return perform


class NumpyEngine:
    """The reference. Implements `hkv.dialects.vllm.engines.engine.KeyedEngine`.

    Args:
      header: the configuration, as a log's first line.

    Attributes:
      manager: the reference's object, for inspection.

    Raises:
      HKVError: a configuration the dialect forbids, or a foreign package called `reference`.
    """

    def __init__(self, header: oplog.Header) -> None:
        check_reference()
        from reference.dialects.vllm.manager import Manager

        self.manager = Manager(to_config(header))
        self._version = header.oplog

    step, advance, append, free, drop, evict, copies, reset = map(
        _of_manager, ("step", "advance", "append", "free", "drop", "evict", "copies", "reset")
    )
    request_keyed, extend, num_free, absence, eviction = map(
        _of_manager, ("request_keyed", "extend", "num_free", "absence", "eviction")
    )
    computed, retire, pop, release, hold = map(_of_live, ("computed", "retire", "pop", "release", "hold"))
    zeros, unwritten, offloads, finalize = map(_of_live, ("zeros", "unwritten", "offloads", "finalize"))

    def request(
        self,
        id: str,
        tokens: Sequence[int],
        extra: oplog.ExtraKeys | None,
        keys: Sequence[str] | None = None,
        session: str = "",
        report: str = "",
    ) -> None:
        self.manager.request(id, tokens, PLAIN if extra is None else identity_of(extra), keys, session, bool(report))

    def lookup(self, id: str, limit: int | None = None) -> oplog.Hit:
        found = self.manager.lookup(id, limit)
        return oplog.Hit(found.hit, found.blocks, found.shared_prefix)

    def connector_lookup(self, id: str, limit: int | None = None) -> oplog.ConnectorHit:
        from reference.dialects.vllm.connector import connector_lookup

        found, diverged, hits = connector_lookup(self.manager, id, limit)
        return oplog.ConnectorHit(found.hit, found.blocks, found.shared_prefix, diverged, hits)

    def truncate(self, rows: oplog.Rows, tokens: int) -> oplog.Rows:
        from reference.dialects.vllm.connector import truncate

        return truncate(self.manager, rows, tokens)

    def allocate(self, operation: oplog.AllocateOp) -> oplog.Allocation:
        fields = {name: getattr(operation, name) for name in operation.__struct_fields__ if name not in ("id", "want")}
        blocks = self.manager.allocate(operation.id, **{**fields, "encoder": operation.encoder or 0})
        return oplog.Allocation(blocks)

    def resume(self, operation: oplog.ResumeOp) -> None:
        from reference.dialects.vllm import live

        identity = None if operation.extra is None else identity_of(operation.extra)
        keep, tokens, keys = operation.keep, operation.tokens, operation.keys or ()
        live.resume(self.manager, operation.id, keep, tokens, operation.prompt, identity, keys)

    def commit(self, id: str, tokens: int) -> None:
        self.manager.commit(id, tokens, checked=self._version < 3)

    def pending_copies(self) -> list[list[tuple[int, int]]]:
        """Copies that `copies` would drain, (source, target), a list a group."""
        return [list(kind.copies) for kind in self.manager.cache.kinds]

    @property
    def evictions(self) -> int:
        """Cached blocks handed out to another use so far."""
        return self.manager.evictions

    def events(self) -> list[oplog.CacheEvent]:
        return told(map(self._event, self.manager.events()), self._version)

    def _event(self, event: object) -> oplog.CacheEvent:
        from reference.state.events import BlockStored, Removed

        match event:
            case BlockStored():
                stored = oplog.CacheEvent(
                    type="stored",
                    group=event.group,
                    num_blocks=len(event.chains),
                    block_size=event.block_size,
                    tokens=list(event.tokens),
                    keys=[key_text(chain) for chain in event.chains],
                    parent="" if event.parent is None else key_text(event.parent),
                )
                config = self.manager.config
                return describe_stored(stored, config, event.identity, event.session, event.ends, event.ahead)
            case Removed():
                keys = [key_text(event.chain)]
                return oplog.CacheEvent(type="removed", group=event.group, num_blocks=1, keys=keys, medium=DEVICE)
            case _:
                return oplog.CacheEvent(type="cleared")

    def state(self) -> oplog.CacheState:
        """State of the cache, as far as engines are compared."""
        manager = self.manager
        pool = manager.pool
        holding = dict.fromkeys(id for kind in manager.cache.kinds for id in kind.rows)
        rows = {id: manager.rows(id) for id in holding}
        return oplog.CacheState(
            free=list(pool.free),
            refs={str(block): count for block, count in enumerate(pool.refs) if count},
            rows={id: blocks for id, blocks in rows.items() if any(blocks)},
            cached={
                str(block): (key[0], pool.covered[block], key_text(key[1]))
                for block, key in enumerate(pool.primary)
                if key is not None
            },
        )


def identity_of(extra: oplog.ExtraKeys) -> PrefixIdentity:
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
