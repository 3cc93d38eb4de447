"""`hkv plan`: groups, pages, block counts and tensors of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from hkv.byte_size import parse_bytes
from hkv.cli.capacity_table import capacity_rows, combinations, drawn, lengths_between, table_csv, table_lines
from hkv.cli.fewest_gpus import deployment_lines, deployments, values_of
from hkv.cli.numbers import Number, percentage
from hkv.cli.output_option import STANDARD_OUTPUT, OutputPath, json_option, talks, write_json, write_output
from hkv.cli.own_options import bugs_of, bugs_option, commands, is_given, own_options, refuse_given, refuse_others
from hkv.contract import registry
from hkv.contract.plan_command import Capacity, OneOrMore, PlanCommand, Several
from hkv.errors import ConfigError, HKVError
from hkv.limits import MAX_COUNT, MAX_RANKS, MAX_SPECULATIVE_TOKENS, MAX_TOKENS
from hkv.model.huggingface import KV_DTYPES, check_layer_list, load_config
from hkv.plot_path import check_plot_path
from hkv.spec import KINDS

if TYPE_CHECKING:
    from hkv.cli.workload import Drawn, Served

PLANNERS = {dialect.planned_as: dialect for dialect in registry.dialects() if dialect.planned_as}
"""Dialects that plan memory, by the names that `--dialect` has for them."""

PLANNED = tuple(PLANNERS)
COMMANDS = commands(lambda dialect: dialect.plan_command())


@click.command("plan")
@click.argument("configs", metavar="CONFIG...", nargs=-1, type=click.Path())
@click.option(
    "layers",
    "--layers",
    metavar="FILE",
    multiple=True,
    type=click.Path(),
    help="Layers listed by hand, in JSON (docs/reading.md), in place of a CONFIG or beside some; repeatable.",
)
@click.option(
    "memory",
    "--memory",
    "--kv-cache-memory-bytes",
    metavar="SIZE",
    help="Memory for the cache on each GPU, such as 80GiB.",
)
@click.option(
    "tp",
    "--tp",
    "--tensor-parallel-size",
    "-tp",
    type=OneOrMore(click.IntRange(1, MAX_RANKS)),
    default=1,
    show_default=True,
    help="Tensor-parallel ranks.",
)
@click.option(
    "pp",
    "--pp",
    "--pipeline-parallel-size",
    "-pp",
    type=OneOrMore(click.IntRange(1, MAX_RANKS)),
    default=1,
    show_default=True,
    help="Pipeline stages.",
)
@click.option(
    "dcp",
    "--dcp",
    "--decode-context-parallel-size",
    "-dcp",
    type=OneOrMore(click.IntRange(1, MAX_RANKS)),
    default=1,
    show_default=True,
    help="Context-parallel ranks; where a rank holds whole blocks, of a prefill server.",
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
@click.option("--dtype", metavar="TYPE", help="The model's element type; left out, its config's.")
@click.option(
    "kv_dtype",
    "--kv-dtype",
    "--kv-cache-dtype",
    type=OneOrMore(click.STRING),
    default="auto",
    show_default=True,
    help=f"One of {', '.join(KV_DTYPES)}.",
)
@click.option("--state-dtype", metavar="TYPE", help="Element type of recurrent states; left out, the model's.")
@click.option("--draft", "draft_path", metavar="CONFIG", help="Config of a draft (EAGLE or MTP) module.")
@click.option(
    "--speculative-tokens",
    type=click.IntRange(0, MAX_SPECULATIVE_TOKENS),
    default=0,
    show_default=True,
    help="Draft tokens verified in one step.",
)
@click.option(
    "ignore_fields",
    "--ignore-field",
    metavar="NAME,...",
    multiple=True,
    help="Fields of CONFIG that HKV does not know, to be read over; noted in the plan. Repeatable.",
)
@click.option("--strict", is_flag=True, help="Refuse every field that HKV does not know, whether it matters or not.")
@own_options(COMMANDS)
@click.option(
    "dialects",
    "--dialect",
    type=OneOrMore(click.Choice(PLANNED)),
    metavar=f"[{'|'.join(PLANNED)}],...",
    multiple=True,
    default=PLANNED[:1],
    show_default=True,
    help="Whose memory plan; repeatable.",
)
@click.option(
    "--requests",
    type=click.IntRange(1, MAX_COUNT),
    help="Find the fewest GPUs that hold so many requests of --max-model-len at once, --tp and --pp as given or tried.",
)
@click.option("--trace", "trace_path", metavar="FILE", help="Say how much of this trace's prompts is hit (hkv replay).")
@click.option("--prompt", type=click.IntRange(1, MAX_TOKENS), help="Likewise of drawn requests: tokens of a prompt.")
@click.option("--answer", type=click.IntRange(1, MAX_TOKENS), help="Tokens of an answer.  [default: 256]")
@click.option("--shared", metavar="P%", help="Share of a prompt that is one of 8 common prefixes.  [default: 50%]")
@click.option("--requests-per-second", type=Number(1e-6, 1e9), help="Requests that arrive a second.  [default: 1]")
@click.option("--target-hit-rate", metavar="P%", help="Find the cheapest change with which so much is hit.")
@bugs_option
@json_option
@click.option("--csv", "csv_path", metavar="F", type=OutputPath(), help="Write the table as CSV to the file F.")
@click.option(
    "--plot", "plot_path", metavar="F", type=OutputPath(), help="Draw what fits against length to F, .png or .svg."
)
@click.pass_context
def command(
    ctx: click.Context,
    configs: tuple[str, ...],
    layers: tuple[str, ...],
    dialects: tuple[Several, ...],
    json_path: str | None,
    csv_path: str | None,
    plot_path: str | None,
    requests: int | None,
    trace_path: str | None,
    prompt: int | None,
    answer: int | None,
    shared: str | None,
    requests_per_second: float | None,
    target_hit_rate: str | None,
    **options: Any,
) -> None:
    """Say what a model's cache looks like: which layers share blocks, how many blocks fit, and where every layer lies.

    CONFIG is a model's config.json, the folder it is in, or a released model by name (gpt-oss-20b). Sizes are those of
    one tensor-parallel rank. How many of the longest requests fit at once is found by letting them run in the pool.

    Of several models, or several values of --tp, --pp, --dcp, --kv-cache-dtype, --max-model-len or --dialect with
    commas between them, it makes one table: a row for each combination.

    Example: hkv plan llama-3.1-8b --gpu h100 --tp 1,2,8 --max-model-len 32k

    Example: hkv plan llama-3.1-70b --gpu h100 --max-model-len 32k --requests 100

    Example: hkv plan gemma-3-4b --gpu l4 --prompt 8000 --answer 400 --shared 60% --requests-per-second 3

    Example: hkv plan Qwen3-Next-80B/config.json --memory 80GiB --tp 2 --max-model-len 131072

    Example: hkv plan --layers layers.json --memory 80GiB

    Example: hkv plan Qwen3-Next-80B-A3B --memory 80GiB --dialect vllm-0.33,rtp-llm

    Example: hkv plan gpt-oss-20b gemma-3-27b --memory 80GiB --tp 1,2 --kv-cache-dtype auto,fp8 --csv capacity.csv
    """
    for path in layers:
        check_layer_list(path, load_config(path))
    configs += layers
    if not configs:
        raise click.UsageError("Missing argument 'CONFIG...', or --layers FILE in its place.")
    options["ignore_fields"] = tuple(name for names in options["ignore_fields"] for name in names.split(",") if name)
    options["bugs"] = frozenset(bugs_of(options["bugs"], "planning"))
    memory = None if options["memory"] is None else parse_bytes(options["memory"])
    chosen = Several(dict.fromkeys(dialect for some in dialects for dialect in some))
    planners = {dialect: PLANNERS[dialect].plan_command() for dialect in chosen}
    for dialect, planner in planners.items():
        refuse_others(planner, COMMANDS, dialect)
        if not PLANNERS[dialect].has_bugs:
            refuse_given(["bugs"], f"nothing with --dialect {dialect}, of which no upstream defect is known")
    if len(planners) > 1:
        options = {"dialect": chosen, **options}
    options["given"] = {name for name in ctx.params if is_given(name)}
    if plot_path is not None:
        check_plot_path(plot_path)

    if requests is not None:
        _fewest(planners[chosen[0]], configs, requests, memory, options, json_path)
        return
    if trace_path is not None or prompt is not None:
        if not planners[chosen[0]].replays_workloads:
            expected = f"nothing with --dialect {chosen[0]}, whose plan does not say how steps are made"
            refuse_given(["trace_path", "prompt"], expected)
        workload = _asked_workload(trace_path, prompt, answer, shared, requests_per_second)
        target = None if target_hit_rate is None else percentage("--target-hit-rate", target_hit_rate)
        _workload(planners[chosen[0]], configs, workload, target, memory, options, json_path, plot_path)
        return
    refuse_given(["answer", "shared", "requests_per_second", "target_hit_rate"], "--prompt or --trace beside it")
    wanted = combinations(configs, options)
    if len(wanted) == 1 and csv_path is None and plot_path is None:
        config, choice = wanted[0]
        plan = planners[chosen[0]].plan(memory, {**options, **choice, "config": config})
        if json_path != STANDARD_OUTPUT:
            plan.show(Console(soft_wrap=False))
        write_json(json_path, plan.report)
        return
    for config in configs:
        load_config(config)  # a name that nobody knows is a slip, not a refused combination

    def capacity(config: str, choice: dict[str, Any]) -> Capacity:
        planner = planners[choice.get("dialect", chosen[0])]
        return planner.capacity(memory, {**options, **choice, "config": config})

    rows = capacity_rows(wanted, capacity)
    if talks(json_path, csv_path, plot_path):
        click.echo("\n".join(table_lines(rows, Console().width)))
    write_json(json_path, {"rows": [row.record() for row in rows]})
    if csv_path is not None:
        write_output(csv_path, table_csv(rows))
    if plot_path is not None:
        write_output(plot_path, drawn(rows, plot_path, capacity_rows(lengths_between(rows), capacity)))


def _fewest(
    planner: PlanCommand,
    configs: Sequence[str],
    requests: int,
    memory: int | None,
    options: dict[str, Any],
    json_path: str | None,
) -> None:
    """Answers `--requests`: ways to hold them, the fewest GPUs first."""
    asked = _single("--requests", configs, options, but=("tp", "pp"))
    ranks, stages = (values_of(options[name], name in options["given"]) for name in ("tp", "pp"))
    found = deployments(requests, ranks, stages, lambda tp, pp: planner.capacity(memory, {**asked, "tp": tp, "pp": pp}))
    best = found[0]
    serve = planner.serve_line({**asked, "tp": best.tp, "pp": best.pp}, best.engines)
    if json_path != STANDARD_OUTPUT:
        click.echo("\n".join(deployment_lines(found, requests, serve)))
    rows = [each.record() for each in found]
    write_json(json_path, {"requests": requests, "deployments": rows, "fewest": rows[0], "serve": serve or None})


def _single(name: str, configs: Sequence[str], options: dict[str, Any], but: Sequence[str] = ()) -> dict[str, Any]:
    """The options with one value each, of one model, for an option that answers a single question."""
    lists = {key: value for key, value in options.items() if isinstance(value, Several) and key not in but}
    if len(configs) > 1 or any(len(values) > 1 for values in lists.values()):
        expected = "one model and one value of each option" + (" but --tp and --pp" if but else "")
        raise ConfigError(name, list(configs), expected)
    return {**options, **{key: values[0] for key, values in lists.items()}, "config": configs[0]}


def _asked_workload(
    trace_path: str | None, prompt: int | None, answer: int | None, shared: str | None, rate: float | None
) -> Drawn | str:
    """The workload that the options say: a trace's path, or numbers.

    Raises:
      ConfigError: they say both, or a share that is none.
    """
    from hkv.cli.workload import Drawn  # NumPy and JAX: a plan does without

    share = percentage("--shared", "50%" if shared is None else shared)
    if trace_path is not None:
        refuse_given(["prompt", "answer", "shared", "requests_per_second"], "none beside --trace, which says all of it")
        return trace_path
    assert prompt is not None
    return Drawn(prompt, answer or 256, share, rate or 1.0)


def _workload(
    planner: PlanCommand,
    configs: Sequence[str],
    workload: Drawn | str,
    target: float | None,
    memory: int | None,
    options: dict[str, Any],
    json_path: str | None,
    plot_path: str | None,
) -> None:
    """Answers `--trace` and `--prompt`: hit rates on the planned GPUs, and what reaches a target."""
    from hkv.cli.workload import Served, answered, workload_lines

    asked = _single("--trace" if isinstance(workload, str) else "--prompt", configs, options)

    def served(tp: int, kv_dtype: str) -> Served:
        report = planner.plan(memory, {**asked, "tp": tp, "kv_dtype": kv_dtype}).report
        settings = report["settings"]
        return Served(
            config=asked["config"],
            memory=settings["memory"],
            tp=tp,
            gpus=tp * asked["pp"],
            kv_dtype=kv_dtype,
            max_model_len=report["max_model_len"],
            step_tokens=settings["max_num_batched_tokens"],
            max_running=settings["max_num_seqs"],
            retains=any(KINDS[group["kind"]].retained_sparsely for group in report["groups"]),
        )

    def other(tp: int, kv_dtype: str) -> Served | None:
        try:
            return served(tp, kv_dtype)
        except HKVError:
            return None

    engine = served(asked["tp"], asked["kv_dtype"])
    report, picture = answered(engine, workload, target, other, plot_path)
    reached = report["target"] and report["target"]["reached"]
    chosen = {"tp": reached["tp"], "kv_dtype": reached["kv_dtype"]} if reached else {}
    serve = planner.serve_line({**asked, **chosen}, 1)
    if reached and "retention" in reached["change"]:
        serve += " --prefix-cache-retention-interval None"
    if json_path != STANDARD_OUTPUT:
        click.echo("\n".join(workload_lines(report, engine, workload, serve)))
    write_json(json_path, {**report, "serve": serve})
    if plot_path is not None:
        write_output(plot_path, picture)
