"""`hkv replay` under RTP-LLM's rules: its options, and the cache that they ask for."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import click

from hkv.contract.options import option
from hkv.dialects.rtp_llm.config import HYBRID_POOL, RtpConfig, reserve_for_ratio
from hkv.dialects.rtp_llm.planned_cache import config_of_plan
from hkv.dialects.rtp_llm.planning import RtpOptions, plan_rtp_llm, served_options
from hkv.dialects.rtp_llm.planning.pools import reserve_option, reserve_ratio
from hkv.dialects.rtp_llm.schedule.run import RtpReplayedCache, check_replayable, rtp_cache
from hkv.errors import ConfigError
from hkv.limits import MAX_TOKENS, parse_bytes, parse_length, show_bytes
from hkv.model.huggingface import ReadOptions, load_config, read_model
from hkv.replay.command import ReplayCommand, StudiedCache, groups_text, model_name, schedule_for_groups, schedule_of
from hkv.replay.schedule import Schedule


@dataclasses.dataclass(frozen=True, kw_only=True)
class RtpReplayOptions:
    """Options of a replay that RTP-LLM's rules add."""

    linear_step: int | None = option(
        type=click.IntRange(0, MAX_TOKENS), help="rtp-llm: blocks between two kept states.  [default: 1]"
    )
    reserve_ratio: int | None = reserve_option("rtp-llm: ")
    prefix_tree: bool = option(False, help="rtp-llm: evict chains of the prefix tree.")
    independent_eviction: bool = option(False, help="rtp-llm: windows may lose blocks alone.")


class RtpReplayCommand(ReplayCommand):
    """Groups or models over a shared pool, or one a group."""

    declared = RtpReplayOptions

    def studied(self, options: dict[str, Any]) -> StudiedCache:
        check_eviction(options)
        return super().studied(options)

    def of_groups(self, options: dict[str, Any]) -> StudiedCache:
        config = config_of_groups(options, options["num_blocks"], caching=options["caching"])
        schedule = schedule_for_groups(options)
        return StudiedCache(
            RtpReplayedCache(config, caching=options["caching"]),
            schedule,
            f"{options['dialect']}, {groups_text(options['groups'])}",
            resolved=_resolved(config, schedule, options),
        )

    def of_model(self, options: dict[str, Any]) -> StudiedCache:
        model = read_model(
            load_config(options["model"]),
            ReadOptions(
                kv_dtype=options["kv_dtype"] or "auto",
                block_size=options["block_size"],
                speculative_tokens=options["lookahead"],
            ),
        )
        pools = "independent" if options["dialect"] == HYBRID_POOL else "shared"
        asked = RtpOptions(
            block_size=options["block_size"] or RtpOptions.block_size,
            pools=pools,
            tensor_parallel=options["tp"] or 1,
            step=_step(options),
            drafts=options["lookahead"],
        )
        given = {"pools", *(["block_size"] if options["block_size"] else [])}
        wanted, _ = served_options(model, asked, given)
        plan = plan_rtp_llm(model, parse_bytes(options["memory"]), wanted)
        config = config_of_plan(
            plan,
            linear_step=_step(options),
            prefix_tree=options["prefix_tree"],
            independent_eviction=options["independent_eviction"],
            reserve_blocks=reserve_for_ratio(reserve_ratio(options), plan.num_blocks - 1),
        )
        check_replayable(config, options["dialect"], options["caching"])
        if options["caching"]:
            _check_windows(model.specs.values(), config.block_size)
        length = parse_length(options["max_model_len"])
        if length == 0:
            raise ConfigError(
                "max_model_len", "auto", "a number of tokens; auto is for dialects that find the longest request"
            )
        schedule = schedule_of(options, length or model.max_model_len)
        return StudiedCache(
            RtpReplayedCache(config, caching=options["caching"]),
            schedule,
            f"{options['dialect']}, {model_name(options['model'], model)} in {options['memory']}",
            _remark(model_name(options["model"], model), config, parse_bytes(options["memory"])),
            _resolved(config, schedule, options),
        )


def check_eviction(options: dict[str, Any]) -> None:
    """Raises click.UsageError if windows are to lose blocks alone where there are no chains."""
    if options["independent_eviction"] and not options["prefix_tree"]:
        raise click.UsageError("--independent-eviction is for --prefix-tree, whose chains it loosens")


def config_of_groups(options: dict[str, Any], num_blocks: Sequence[int], *, caching: bool = True) -> RtpConfig:
    """The cache of `--groups` and of the options of this dialect alone; arguments as `rtp_cache` has them."""
    return rtp_cache(
        options["dialect"],
        options["groups"],
        num_blocks,
        linear_step=_step(options),
        reserve_ratio=reserve_ratio(options),
        prefix_tree=options["prefix_tree"],
        independent_eviction=options["independent_eviction"],
        caching=caching,
    )


def _resolved(config: RtpConfig, schedule: Schedule, options: dict[str, Any]) -> str:
    """All that the options came to be, but for the size of the pools."""
    eviction = "by chains of the prefix tree" if config.prefix_tree else "of keys in order of use"
    if config.independent_eviction:
        eviction += ", windows alone"
    said = (
        f"blocks of {config.block_size} tokens",
        f"states kept every {config.linear_step}",
        f"{reserve_ratio(options)} % of the blocks in reserve",
        f"eviction {eviction}",
        f"reuse {'on' if options['caching'] else 'off'}",
        f"{schedule.step_tokens:,} tokens a step",
        f"{schedule.max_running:,} requests",
        f"up to {schedule.max_model_len:,} tokens each",
    )
    return f"RTP-LLM ({options['dialect']}): {', '.join(said)}"


def _check_windows(specs: Any, size: int) -> None:
    for spec in specs:
        if spec.most_read > size + 1:
            expected = f"a model whose windows are at most {size + 1} tokens, a block and one: hits bring one block"
            expected += f"; --block-size {spec.most_read - spec.slides}, or --no-caching"
            raise ConfigError("model", f"{'window' if spec.slides else 'chunk'} {spec.most_read}", expected)


def _remark(name: str, config: RtpConfig, memory: int) -> str:
    pools = ", ".join(f"{count:,}" for count in config.num_blocks)
    groups = len(config.topology.groups)
    return f"{name}: {groups} group{'s' * (groups > 1)}, pools of {pools} blocks in {show_bytes(memory)}"


def _step(options: dict[str, Any]) -> int:
    return 1 if options["linear_step"] is None else options["linear_step"]
