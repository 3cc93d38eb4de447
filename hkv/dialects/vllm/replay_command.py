"""`hkv replay` under vLLM 0.33's rules: its options, and the cache that they ask for, by groups or by a plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from hkv.contract.options import TOKENS, Number, Written, option
from hkv.dialects.vllm.config import EARLIER, VllmConfig
from hkv.dialects.vllm.offload.config import BUGS, POLICIES, OffloadConfig, chunk_bytes
from hkv.dialects.vllm.planning.cache_plan import cache_config as config_of_plan
from hkv.dialects.vllm.planning.cache_plan import copies_in_a_chunk, serve
from hkv.dialects.vllm.planning.engine_options import DEVICES, EngineOptions
from hkv.dialects.vllm.planning.engine_settings import batch_defaults
from hkv.dialects.vllm.schedule.run import VllmReplayedCache, cache_config, with_match_unit
from hkv.errors import ConfigError, PlanError, UnsupportedConfigError
from hkv.limits import MAX_BLOCKS, MAX_COUNT, MAX_TOKENS, parse_bytes, parse_length, show_bytes, whole_number
from hkv.model.huggingface import ReadOptions, load_config, read_model
from hkv.model.topology import Topology
from hkv.replay.command import ReplayCommand, StudiedCache, groups_text, model_name, schedule_for_groups, schedule_of
from hkv.replay.run import COMPILED, REFERENCE
from hkv.replay.schedule import Schedule

if TYPE_CHECKING:
    from hkv.dialects.vllm.schedule.tier import Tier

UNPLANNED = {**dict.fromkeys(("mi300x", "mi325x", "mi355x"), (16384, 1024)), "a10g": (2048, 256)}
"""Devices that HKV has no plans for: vLLM 0.33's `max_num_batched_tokens` and `max_num_seqs` on them."""


def _batch(device: str) -> tuple[int, int]:
    """Most tokens of a step and requests running, by `EngineArgs.get_batch_defaults` for `vllm serve`."""
    return UNPLANNED.get(device) or batch_defaults(EngineOptions(device=device))


def _eagle(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if parts == ["all"]:
        return ()
    numbers = [whole_number(part) for part in parts]
    if None in numbers:
        raise ConfigError("eagle", text, "all, or indices of groups between commas")
    return tuple(sorted({number for number in numbers if number is not None}))


EAGLE = Written("all|groups", _eagle, lambda groups: None if groups is None else ",".join(map(str, groups)) or "all")
"""`all`, or indices between commas."""


def _retention(text: str) -> int | None:
    tokens = None if text == "dense" else whole_number(text)
    if text != "dense" and (tokens is None or tokens > MAX_TOKENS):
        raise ConfigError("retention", text, f"dense, or a number of tokens, at most {MAX_TOKENS}")
    return tokens


RETENTION = Written("dense|tokens", _retention, lambda tokens: "dense" if tokens is None else tokens)
"""`dense`, or a number of tokens."""


def _bandwidth(text: str) -> int:
    if not text.endswith("/s"):
        raise ConfigError("offload-bandwidth", text, "bytes in a second, such as 50GB/s")
    return parse_bytes(text.removesuffix("/s"), "offload-bandwidth")


BANDWIDTH = Written("rate", _bandwidth, lambda rate: None if rate is None else f"{rate}/s")
"""Bytes in a second, such as 50GB/s."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class VllmReplayOptions:
    """Options of a replay that vLLM's rules add."""

    draft: str | None = option(metavar="CONFIG", help="With --model: config of a draft (EAGLE or MTP) module.")
    eagle: Sequence[int] | None = option(type=EAGLE, help="EAGLE drop rule, for these groups.")
    retention: int | None = option(
        "0",
        type=RETENTION,
        help="Tokens between retained replay boundaries of windows and states; 0: the last one only.",
    )
    prefix_match_unit: int | None = option(
        type=TOKENS,
        help="Tokens of a prefix's hash: beside recurrent groups, hits may end inside blocks.  [default: what the "
        "groups' blocks have in common]",
    )
    device: str | None = option(
        type=click.Choice([*DEVICES, *UNPLANNED]),
        help="Take --step-tokens and --max-running as `vllm serve` does on this device.",
    )
    offload: str | None = option(
        metavar="SIZE",
        help="A second tier in host memory (`--kv-offloading-size`), for --engine jax and numpy: with --model a size "
        "over all its GPUs, such as 64GiB; with --groups a number of chunks, each a block of any group; 0 for none.",
    )
    offload_kind: str = option(
        "native",
        type=click.Choice(("native", "lmcache")),
        help="With --offload: vLLM's own offloading, or LMCache's (`--kv-offloading-backend`).",
    )
    offload_chunk_tokens: int | None = option(
        type=TOKENS, help="With --offload-kind lmcache: tokens of a chunk.  [default: 256]"
    )
    offload_policy: str = option("lru", type=POLICIES, help="With --offload: what leaves it first.")
    offload_store_threshold: int = option(
        0, type=click.IntRange(0, MAX_COUNT), help="With --offload: store a chunk when it is offered the Nth time."
    )
    offload_decode: bool = option(False, help="With --offload: store what is generated, too, not prompts alone.")
    offload_defects: bool = option(
        True,
        "--offload-defects/--no-offload-defects",
        help="With --offload: as vLLM's is, or with its contracts kept where it breaks them.",
    )
    offload_bandwidth: int | None = option(
        type=BANDWIDTH,
        help="With --offload and --model: bytes that a GPU moves each way, such as 50GB/s.  [default: no limit]",
    )
    offload_transfer_ms: float = option(
        0.0,
        type=Number(min=0, max=MAX_COUNT),
        help="With --offload-bandwidth: milliseconds that each transfer takes besides its bytes.",
    )
    prefill_tokens_per_second: float | None = option(
        type=Number(min=0, min_open=True, max=MAX_COUNT),
        help="With --offload-bandwidth: prompt tokens computed in a second; says which loads that would have beaten.",
    )


class VllmReplayCommand(ReplayCommand):
    """Groups or models over one pool."""

    declared = VllmReplayOptions

    def studied(self, options: dict[str, Any]) -> StudiedCache:
        if options["device"] is not None:
            tokens, running = _batch(options["device"])
            options = {
                **options,
                "step_tokens": tokens if options["step_tokens"] is None else options["step_tokens"],
                "max_running": running if options["max_running"] is None else options["max_running"],
            }
        return super().studied(options)

    def of_groups(self, options: dict[str, Any]) -> StudiedCache:
        if options["draft"] is not None:
            raise click.UsageError("--draft is not for --groups")
        schedule = schedule_for_groups(options)
        if len(options["num_blocks"]) != 1:
            wanted = "one number, vLLM having one pool; `hkv sweep` takes several sizes as A;B;C"
            raise ConfigError("num_blocks", list(options["num_blocks"]), wanted)
        config = cache_config(
            options["groups"],
            options["num_blocks"][0],
            schedule,
            caching=options["caching"],
            eagle=options["eagle"],
            retention_interval=options["retention"],
        )
        config = dataclasses.replace(config, dialect=options["dialect"])
        if options["prefix_match_unit"] is not None:
            config = with_match_unit(config, options["prefix_match_unit"])
        resolved = _served(config, schedule, options)
        cache = _with_tier(config, schedule, options)
        return StudiedCache(cache, schedule, groups_text(options["groups"]), resolved=resolved)

    def of_model(self, options: dict[str, Any]) -> StudiedCache:
        if options["dialect"] == EARLIER:
            raise ConfigError("model", options["model"], f"--groups: how {EARLIER} plans a model is not described")
        reading = {"tensor_parallel": options["tp"] or 1, "kv_dtype": options["kv_dtype"] or "auto"}
        model = read_model(
            load_config(options["model"]),
            ReadOptions(block_size=options["block_size"], speculative_tokens=options["lookahead"], **reading),
        )
        draft = None
        if options["draft"] is not None:
            size = next((spec.block_size for spec in model.specs.values()), None)
            draft = read_model(load_config(options["draft"]), ReadOptions(block_size=size, draft=True, **reading))
        length = parse_length(options["max_model_len"])  # 0: the longest that fits
        tokens = schedule_of(options, Schedule.max_model_len).step_tokens
        served = serve(
            model,
            parse_bytes(options["memory"]),
            draft=draft,
            max_model_len=length,
            max_in_flight_tokens=min(tokens, length or model.max_model_len),
            caching=options["caching"],
        )
        if not served.plan.groups:
            raise PlanError("model", model.model_type, "a model that caches something")
        config = config_of_plan(served.plan, served.limits, caching=options["caching"])
        config = dataclasses.replace(config, retention_interval=options["retention"])
        if options["prefix_match_unit"] is not None:
            config = with_match_unit(config, options["prefix_match_unit"])
        if options["eagle"] is not None:
            config = _with_eagle(config, options["eagle"])
        size = max(worker.bytes_per_block for worker in served.plan.workers)
        called = model_name(options["model"], model)
        groups, blocks = len(config.topology.groups), f"{config.num_blocks:,} blocks of {show_bytes(size)}"
        remark = (
            f"{called}: {groups} group{'s' * (groups > 1)}, {blocks}, "
            f"hits at multiples of {config.scheduler_block_size:,} tokens, requests of up to {config.max_model_len:,}"
        )
        name = f"{called} in {options['memory']}"
        schedule = schedule_of(options, config.max_model_len)
        resolved = _served(config, schedule, options)
        cache = _with_tier(config, schedule, options, size, copies_in_a_chunk(served.plan, options["tp"] or 1))
        return StudiedCache(cache, schedule, name, remark, resolved)


def _with_tier(
    config: VllmConfig, schedule: Schedule, options: dict[str, Any], block_bytes: int | None = None, copies: int = 1
) -> VllmReplayedCache:
    """The cache, with the second tier that the options ask for.

    `block_bytes` are of a block on a GPU, where known, and `copies` the GPUs whose blocks a chunk holds.
    """
    size, bandwidth, rate = options["offload"], options["offload_bandwidth"], options["prefill_tokens_per_second"]
    if size is None:
        declared = {field.name: field.default for field in dataclasses.fields(VllmReplayOptions)}
        for name in (*(name for name in declared if name.startswith("offload_")), "prefill_tokens_per_second"):
            if options[name] != declared[name]:
                raise ConfigError(name, options[name], "--offload beside it")
    if size is None or whole_number(size) == 0:
        return VllmReplayedCache(config, block_bytes or 0)
    if (engine := options.get("engine", COMPILED)) not in (COMPILED, REFERENCE):
        raise ConfigError("offload", size, f"--engine {COMPILED} or {REFERENCE} beside it, not {engine}")
    if config.dialect == EARLIER:
        raise ConfigError("offload", size, f"none: the second tier of {EARLIER} is not described")
    if bandwidth is not None and block_bytes is None:
        raise ConfigError("offload_bandwidth", bandwidth, "--model, which says how many bytes a block has")
    if options["offload_transfer_ms"] and bandwidth is None:
        raise ConfigError("offload_transfer_ms", options["offload_transfer_ms"], "--offload-bandwidth beside it")
    if rate is not None and bandwidth is None:
        raise ConfigError("prefill_tokens_per_second", rate, "--offload-bandwidth beside it")
    from hkv.dialects.vllm.schedule.tiered import TieredCache

    recurrent = any(spec.keeps_states for spec in config.topology.specs)
    config = dataclasses.replace(config, offloads=recurrent and config.caching)
    chunks = (
        whole_number(size)
        if block_bytes is None
        else parse_bytes(size, "offload") // chunk_bytes(block_bytes, copies, 1)
    )
    if chunks is None or not 1 <= chunks <= MAX_BLOCKS:
        expected = (
            f"a number of chunks from 1 to {MAX_BLOCKS}" if block_bytes is None else "the size of a chunk at least"
        )
        raise ConfigError("offload", size, expected)
    lmcache, drafts = options["offload_kind"] == "lmcache", schedule.lookahead if config.eagle else 0
    if config.eagle and not drafts:
        expected = "--lookahead of at least 1 beside --offload: the tokens that a draft proposes each step"
        raise ConfigError("eagle", "no lookahead", expected)
    if config.eagle and schedule.decode_tokens > 1 + drafts:
        expected = f"at most {1 + drafts} beside --offload: one token, and those of a draft's that are accepted"
        raise ConfigError("decode_tokens", schedule.decode_tokens, expected)
    if lmcache and config.eagle:
        raise UnsupportedConfigError("offload_kind", "lmcache", "native beside a draft")
    tier = OffloadConfig(
        cache=config,
        num_chunks=chunks,
        policy=options["offload_policy"],
        threshold=options["offload_store_threshold"],
        prompt_only=not options["offload_decode"],
        workers=options["tp"] or 1,
        step_tokens=schedule.step_tokens,
        most_running=schedule.max_running,
        eagle=config.topology.eagle_groups,
        drafts=drafts,
        bugs=frozenset(BUGS if options["offload_defects"] else ()),
    )
    if lmcache and tier.tails:
        expected = "the block size: LMCache keeps no tails inside blocks"
        raise UnsupportedConfigError("hash_block_size", config.hash_block_size, expected)
    if lmcache:
        return _with_lmcache(tier, options, block_bytes, copies)
    if options["offload_chunk_tokens"] is not None:
        raise ConfigError("offload_chunk_tokens", options["offload_chunk_tokens"], "--offload-kind lmcache beside it")
    return TieredCache(config, _speeds(tier, options, block_bytes, copies))


def _speeds(tier: OffloadConfig, options: dict[str, Any], block_bytes: int | None, copies: int) -> Tier:
    """The tier, and how fast it is."""
    from hkv.dialects.vllm.schedule.tier import Tier

    bandwidth, rate, milliseconds = (
        options["offload_bandwidth"],
        options["prefill_tokens_per_second"],
        options["step_ms"],
    )
    return Tier(
        config=tier,
        chunk_bytes=block_bytes or 0,
        copies=copies,
        step_bytes=None if bandwidth is None else max(1, bandwidth * milliseconds // 1000),
        setup_bytes=round((bandwidth or 0) * options["offload_transfer_ms"] / 1000),
        step_tokens=None if rate is None else rate * (milliseconds / 1000),
    )


def _with_lmcache(
    tier: OffloadConfig, options: dict[str, Any], block_bytes: int | None, copies: int
) -> VllmReplayedCache:
    """The cache with LMCache's server behind it, which has one policy here, and no threshold."""
    from hkv.dialects.vllm.schedule.lmcache import CHUNK, LmcacheCache

    for name, known in (("offload_policy", "lru"), ("offload_store_threshold", 0), ("offload_defects", True)):
        if options[name] != known:
            raise ConfigError(name, options[name], f"{known} with --offload-kind lmcache")
    chunk = options["offload_chunk_tokens"] or CHUNK
    plain = dataclasses.replace(tier, cache=dataclasses.replace(tier.cache, offloads=False), bugs=frozenset())
    return LmcacheCache(_speeds(plain, options, block_bytes, copies), chunk, 1000 // options["step_ms"])


def _served(config: VllmConfig, schedule: Schedule, options: dict[str, Any]) -> str:
    """The options of `vllm serve` 0.33 that a replay stands for, but for the size of the pool."""
    retention = "None" if config.retention_interval is None else str(config.retention_interval)
    given = {
        "max-model-len": schedule.max_model_len,
        "max-num-batched-tokens": schedule.step_tokens,
        "max-num-seqs": schedule.max_running,
        "tensor-parallel-size": options["tp"],
        "kv-cache-dtype": options["kv_dtype"],
        "block-size": options["block_size"],
        "prefix-match-unit": options["prefix_match_unit"],
        "prefix-cache-retention-interval": retention,
    }
    if options["model"] is not None and (tier := options["offload"]) is not None and whole_number(tier) != 0:
        given |= {"kv-offloading-size": f"{parse_bytes(tier, 'offload') / 2**30:g}"}
        given |= {"kv-offloading-backend": options["offload_kind"]}
    words = ["vllm serve", *([] if options["model"] is None else [options["model"]])]
    words += [f"--{name} {value}" for name, value in given.items() if value is not None]
    words.append("--enable-prefix-caching" if config.caching else "--no-enable-prefix-caching")
    return " ".join(words)


def _with_eagle(config: VllmConfig, eagle: Sequence[int]) -> VllmConfig:
    """The same cache with the drop rule on for these groups, or for all when there are none."""
    Topology.of_specs(config.topology.specs, eagle)
    groups = tuple(
        dataclasses.replace(group, eagle=index in eagle) for index, group in enumerate(config.topology.groups)
    )
    return dataclasses.replace(config, topology=Topology(groups), eagle=True)
