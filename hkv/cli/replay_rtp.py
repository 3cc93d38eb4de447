"""Which cache `hkv replay --dialect rtp-llm/...` studies, and the options that only RTP-LLM's rules or vLLM's have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from hkv.byte_size import parse_bytes, show_bytes
from hkv.cli.replay_cache import StudiedCache, check_cache_options, groups_text, schedule_for_groups, schedule_of
from hkv.dialects.rtp_llm.config import HYBRID_POOL, RtpConfig, reserve_for_ratio
from hkv.dialects.rtp_llm.config import NAMES as RTP_LLM
from hkv.dialects.rtp_llm.planned import config_of_plan
from hkv.dialects.rtp_llm.planning import RtpOptions, plan_rtp_llm
from hkv.dialects.rtp_llm.schedule.run import RESERVE_RATIO, check_replayable, rtp_cache
from hkv.dialects.vllm.config import NAME as VLLM
from hkv.errors import ConfigError
from hkv.model.huggingface import ReadOptions, load_config, read_model
from hkv.request_length import parse_length
from hkv.spec import SlidingWindow

BLOCK_SIZE = 64
"""Tokens per block of a planned cache unless told otherwise, as in `hkv plan --dialect rtp-llm`."""

OF_RTP = {"linear_step": None, "reserve_ratio": None, "prefix_tree": False, "independent_eviction": False}
"""Options that only RTP-LLM's rules have, and what they are when not given."""

OF_VLLM = {"eagle": None, "retention": None, "draft": None}
"""Options that only vLLM's have."""


def rtp_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds `--dialect` and the options of RTP-LLM's rules."""
    options = (
        click.option(
            "--dialect", type=click.Choice((VLLM, *RTP_LLM)), default=VLLM, show_default=True, help="Whose rules."
        ),
        click.option(
            "--linear-step", type=click.IntRange(min=0), help="rtp-llm: blocks between two kept states.  [default: 1]"
        ),
        click.option(
            "--reserve-ratio",
            type=click.IntRange(0, 100),
            help=f"rtp-llm: percent of the blocks that a first allocation leaves free.  [default: {RESERVE_RATIO}]",
        ),
        click.option("--prefix-tree", is_flag=True, help="rtp-llm: evict chains of the prefix tree."),
        click.option("--independent-eviction", is_flag=True, help="rtp-llm: windows may lose blocks alone."),
    )
    for option in reversed(options):
        function = option(function)
    return function


def refuse_rtp_options(options: dict[str, Any]) -> None:
    """Makes sure that no option of RTP-LLM's rules is given.

    Raises:
      click.UsageError: names the first that is.
    """
    _refuse(options, OF_RTP, "is for --dialect rtp-llm/...")


def studied_rtp_cache(options: dict[str, Any]) -> StudiedCache:
    """The cache that the command's options ask for.

    Args:
      options: the command's, by name.

    Raises:
      click.UsageError: both or neither of a model and groups, or an option of vLLM's rules.
      HKVError: the model, its plan or the groups cannot be used.
    """
    _refuse(options, OF_VLLM, f"is not for --dialect {options['dialect']}")
    if options["independent_eviction"] and not options["prefix_tree"]:
        raise click.UsageError("--independent-eviction is for --prefix-tree, whose chains it loosens")
    return _of_model(options) if check_cache_options(options) else _of_groups(options)


def _refuse(options: dict[str, Any], absent: dict[str, Any], why: str) -> None:
    for name, value in absent.items():
        if options[name] != value:
            raise click.UsageError(f"--{name.replace('_', '-')} {why}")


def _of_groups(options: dict[str, Any]) -> StudiedCache:
    config = rtp_cache(
        options["dialect"],
        options["groups"],
        options["num_blocks"],
        linear_step=_step(options),
        reserve_ratio=_ratio(options),
        prefix_tree=options["prefix_tree"],
        independent_eviction=options["independent_eviction"],
        caching=options["caching"],
    )
    return StudiedCache(config, schedule_for_groups(options), f"{options['dialect']}, {groups_text(options)}")


def _of_model(options: dict[str, Any]) -> StudiedCache:
    model = read_model(
        load_config(options["model"]),
        ReadOptions(
            tensor_parallel=options["tp"] or 1,
            kv_dtype=options["kv_dtype"] or "auto",
            block_size=options["block_size"],
            speculative_tokens=options["lookahead"],
        ),
    )
    pools = "independent" if options["dialect"] == HYBRID_POOL else "shared"
    plan = plan_rtp_llm(
        model,
        parse_bytes(options["memory"]),
        RtpOptions(
            block_size=options["block_size"] or BLOCK_SIZE,
            pools=pools,
            step=_step(options),
            drafts=options["lookahead"],
        ),
    )
    config = config_of_plan(
        plan,
        linear_step=_step(options),
        prefix_tree=options["prefix_tree"],
        independent_eviction=options["independent_eviction"],
        reserve_blocks=reserve_for_ratio(_ratio(options), plan.num_blocks - 1),
    )
    check_replayable(config, options["dialect"], options["caching"])
    _check_windows(model.specs.values(), config.block_size)
    length = parse_length(options["max_model_len"])
    if length == 0:
        raise ConfigError("max_model_len", "auto", f"a number of tokens; auto is for --dialect {VLLM}")
    return StudiedCache(
        config,
        schedule_of(options, length or model.max_model_len),
        f"{options['dialect']}, {model.model_type} in {options['memory']}",
        _remark(model.model_type, config, parse_bytes(options["memory"])),
    )


def _check_windows(specs: Any, size: int) -> None:
    for spec in specs:
        if isinstance(spec, SlidingWindow) and spec.window > size + 1:
            expected = f"a model whose windows are at most {size + 1} tokens, a block and one: hits bring one block"
            raise ConfigError("model", f"window {spec.window}", expected)


def _remark(name: str, config: RtpConfig, memory: int) -> str:
    pools = ", ".join(f"{count:,}" for count in config.num_blocks)
    groups = len(config.topology.groups)
    return f"{name}: {groups} group{'s' * (groups > 1)}, pools of {pools} blocks in {show_bytes(memory)}"


def _step(options: dict[str, Any]) -> int:
    return 1 if options["linear_step"] is None else options["linear_step"]


def _ratio(options: dict[str, Any]) -> int:
    return RESERVE_RATIO if options["reserve_ratio"] is None else options["reserve_ratio"]
