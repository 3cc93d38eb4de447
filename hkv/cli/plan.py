"""`hkv plan`: groups, pages, block counts and tensors of a model."""

from __future__ import annotations

import click

from hkv.byte_size import parse_bytes
from hkv.cli.bugs_option import bugs_of, bugs_option
from hkv.cli.given_options import refuse_given
from hkv.cli.json_output import json_option, write_json
from hkv.cli.plan_tables import print_pools, print_served
from hkv.dialects.rtp_llm.planning import RtpOptions, plan_rtp_llm
from hkv.dialects.vllm.planning.report import pool_report, served_report
from hkv.dialects.vllm.planning.served import Serving, serve
from hkv.errors import ConfigError, PlanError
from hkv.limits import MAX_RANKS, MAX_SPECULATIVE_TOKENS, MAX_TOKENS
from hkv.model.huggingface import KV_DTYPES, Model, ReadOptions, load_config, read_model
from hkv.request_length import parse_length

DIALECTS = ("vllm-0.33", "rtp-llm")

NOT_OF_RTP = {
    "layout": "whose pools have one order",
    "max_model_len": "whose plan does not depend on the longest request",
    "max_in_flight": "whose plan does not depend on the tokens of a step",
    "no_prefix_caching": "whose plan is the same without it",
    "no_hybrid": "whose plan keeps every kind of layer",
    "bugs": "of which no upstream defect in planning is known",
}
"""Options that say nothing to RTP-LLM's planning, and why."""


@click.command("plan")
@click.argument("config", type=click.Path())
@click.option("--memory", required=True, metavar="SIZE", help="Memory for the cache on each GPU, such as 80GiB.")
@click.option("--tp", type=click.IntRange(1, MAX_RANKS), default=1, show_default=True, help="Tensor-parallel ranks.")
@click.option("--pp", type=click.IntRange(1, MAX_RANKS), default=1, show_default=True, help="Pipeline stages.")
@click.option(
    "--dcp",
    type=click.IntRange(1, MAX_RANKS),
    default=1,
    show_default=True,
    help="Context-parallel ranks; rtp-llm: of a prefill server.",
)
@click.option(
    "--block-size",
    type=click.IntRange(1, MAX_TOKENS),
    help="Tokens per block; left out, what the model's kernels want.",
)
@click.option(
    "--kernel-block-size",
    type=click.IntRange(0, MAX_TOKENS),
    default=0,
    help="Tokens per kernel block; left out, the whole block.",
)
@click.option("--layout", metavar="ORDER", help="LBHNC, LBNHC, LHBNC, BLHNC, BLNHC or BHLNC; left out, the first fit.")
@click.option("--dtype", metavar="TYPE", help="The model's element type; left out, its config's.")
@click.option("--kv-dtype", default="auto", show_default=True, help=f"One of {', '.join(KV_DTYPES)}.")
@click.option("--state-dtype", metavar="TYPE", help="Element type of recurrent states; left out, the model's.")
@click.option("--max-model-len", metavar="N", help="Tokens of the longest request; `auto` for the longest that fits.")
@click.option(
    "--max-in-flight",
    type=click.IntRange(1, MAX_TOKENS),
    default=8192,
    show_default=True,
    help="Tokens scheduled at once.",
)
@click.option("--draft", "draft_path", metavar="CONFIG", help="Config of a draft (EAGLE or MTP) module.")
@click.option(
    "--draft-modules",
    type=click.IntRange(1, MAX_SPECULATIVE_TOKENS),
    default=1,
    show_default=True,
    help="Copies of the draft, with --dialect rtp-llm.",
)
@click.option(
    "--speculative-tokens",
    type=click.IntRange(0, MAX_SPECULATIVE_TOKENS),
    default=0,
    show_default=True,
    help="Draft tokens verified in one step.",
)
@click.option("--no-prefix-caching", is_flag=True, help="Keep one recurrent state a request, none at boundaries.")
@click.option("--no-hybrid", is_flag=True, help="Cache every layer like full attention.")
@click.option("--pools", type=click.Choice(["shared", "independent"]), default="shared", show_default=True)
@click.option("--dialect", type=click.Choice(DIALECTS), default=DIALECTS[0], show_default=True)
@bugs_option
@json_option
def command(
    config: str,
    memory: str,
    tp: int,
    pp: int,
    dcp: int,
    block_size: int | None,
    kernel_block_size: int,
    layout: str | None,
    dtype: str | None,
    kv_dtype: str,
    state_dtype: str | None,
    max_model_len: str | None,
    max_in_flight: int,
    draft_path: str | None,
    draft_modules: int,
    speculative_tokens: int,
    no_prefix_caching: bool,
    no_hybrid: bool,
    pools: str,
    dialect: str,
    bugs: str,
    json_path: str | None,
) -> None:
    """Say what a model's cache looks like: which layers share blocks, how many blocks fit, and where every layer lies.

    CONFIG is a model's config.json, or the folder it is in. Sizes are those of one tensor-parallel rank. How many of
    the longest requests fit at once is found by letting them run through the pool.

    Example: hkv plan Qwen3-Next-80B/config.json --memory 80GiB --tp 2 --max-model-len 131072
    """
    names = frozenset(bugs_of(bugs, "planning"))
    budget = parse_bytes(memory)
    by_rtp = dialect == "rtp-llm"
    if by_rtp:
        _check_rtp_options(tp, pp, dcp)
    if draft_path is None:
        refuse_given(["draft_modules"], "--draft CONFIG beside it, the module that is copied")
    ranks = 1 if by_rtp else dcp  # RTP-LLM's rank holds whole blocks, not parts of each
    reading = {"tensor_parallel": tp, "context_parallel": ranks, "dtype": dtype, "kv_dtype": kv_dtype}
    options = ReadOptions(
        block_size=block_size, state_dtype=state_dtype, speculative_tokens=speculative_tokens, **reading
    )
    model = read_model(load_config(config), options)
    draft = None
    if draft_path is not None:
        size = next((spec.block_size for spec in model.specs.values()), None)
        draft = read_model(load_config(draft_path), ReadOptions(block_size=size, draft=True, **reading))
    if by_rtp:
        rtp = RtpOptions(
            block_size=block_size or 64,
            kernel_block_size=kernel_block_size,
            pools=pools,
            drafts=speculative_tokens,
            modules=draft_modules,
            ranks=dcp,
        )
        _plan_pools(model, budget, rtp, draft, json_path)
        return
    if pools != "shared":
        raise PlanError("pools", pools, "shared: vllm-0.33 has one pool; --dialect rtp-llm has others")
    if draft_modules != 1:
        raise ConfigError("--draft-modules", draft_modules, "1: vllm-0.33 plans a draft's layers once")
    serving = Serving(
        memory=budget,
        pipeline_parallel=pp,
        context_parallel=dcp,
        kernel_block_size=kernel_block_size,
        layout=layout,
        max_model_len=parse_length(max_model_len),
        max_in_flight_tokens=max_in_flight,
        caching=not no_prefix_caching,
        hybrid=not no_hybrid,
        bugs=names,
    )
    served = serve(model, serving, draft)
    report = served_report(model, served, kernel_block_size)
    if json_path != "-":
        print_served(report, served)
    write_json(json_path, report)


def _check_rtp_options(tp: int, pp: int, dcp: int) -> None:
    for name, why in NOT_OF_RTP.items():
        refuse_given([name], f"nothing with --dialect rtp-llm, {why}")
    if pp > 1:
        raise ConfigError("--pp", pp, "1 with --dialect rtp-llm, which has no pipeline stages")
    if dcp > 1 and tp > 1:
        raise ConfigError("--tp", tp, "1 with --dcp: RTP-LLM's ranks either split heads or deal blocks out")


def _plan_pools(model: Model, memory: int, options: RtpOptions, draft: Model | None, json_path: str | None) -> None:
    plan = plan_rtp_llm(model, memory, options, draft)
    report = pool_report(model, plan)
    if json_path != "-":
        print_pools(report)
    write_json(json_path, report)
