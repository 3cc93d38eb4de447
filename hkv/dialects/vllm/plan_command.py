"""`hkv plan` under vLLM 0.33's rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from hkv.dialects.plan_command import ModelPlan, PlanCommand, read_models
from hkv.dialects.vllm.planning.report import served_report
from hkv.dialects.vllm.planning.served import Serving, serve
from hkv.dialects.vllm.planning.tables import print_served
from hkv.limits import MAX_TOKENS
from hkv.request_length import parse_length


class VllmPlanCommand(PlanCommand):
    """One pool of blocks, and what fits."""

    def options(self) -> Sequence[click.Option]:
        return (
            click.Option(
                ["--layout"],
                metavar="ORDER",
                help="LBHNC, LBNHC, LHBNC, BLHNC, BLNHC or BHLNC; left out, the first fit.",
            ),
            click.Option(
                ["--max-model-len"],
                metavar="N",
                help="Tokens of the longest request; `auto` for the longest that fits.",
            ),
            click.Option(
                ["--max-in-flight"],
                type=click.IntRange(1, MAX_TOKENS),
                default=8192,
                show_default=True,
                help="Tokens scheduled at once.",
            ),
            click.Option(
                ["--no-prefix-caching"], is_flag=True, help="Keep one recurrent state a request, none at boundaries."
            ),
            click.Option(["--no-hybrid"], is_flag=True, help="Cache every layer like full attention."),
        )

    def plan(self, memory: int, options: dict[str, Any]) -> ModelPlan:
        model, draft = read_models(options, options["dcp"])
        serving = Serving(
            memory=memory,
            pipeline_parallel=options["pp"],
            context_parallel=options["dcp"],
            kernel_block_size=options["kernel_block_size"],
            layout=options["layout"],
            max_model_len=parse_length(options["max_model_len"]),
            max_in_flight_tokens=options["max_in_flight"],
            caching=not options["no_prefix_caching"],
            hybrid=not options["no_hybrid"],
            bugs=options["bugs"],
        )
        served = serve(model, serving, draft)
        report = served_report(model, served, options["kernel_block_size"])
        return ModelPlan(report, lambda console: print_served(console, report, served))
