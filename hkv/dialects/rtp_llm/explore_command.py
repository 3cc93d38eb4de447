"""`hkv explore` under RTP-LLM's rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from hkv.contract.explore_command import Exploration, ExploreCommand, Progress, Report, Search, size_options
from hkv.dialects.rtp_llm.explorer import RtpExplorer, RtpSpace
from hkv.dialects.rtp_llm.replay_command import RtpReplayCommand, check_eviction, config_of_groups
from hkv.errors import ConfigError


class RtpExploreCommand(ExploreCommand):
    """The NumPy reference, with every invariant that `hkv watch` asks."""

    def options(self) -> Sequence[click.Option]:
        return (*size_options(), *RtpReplayCommand().options())

    def search(self, options: dict[str, Any]) -> RtpSearch:
        check_eviction(options)
        if options["watermark"]:
            raise ConfigError("--watermark", options["watermark"], f"0: {options['dialect']} has --reserve-ratio")
        longest, prompt = options["max_model_len"], options["prompt"]
        space = RtpSpace(
            config=config_of_groups(options, (options["num_blocks"],)),
            requests=options["requests"],
            prompt=longest if prompt is None else prompt,
            max_model_len=longest,
        )
        return RtpSearch(RtpExplorer(space, limit_states=options["limit_states"], seconds=options["seconds"]))


class RtpSearch(Search):
    """Goes breadth-first through a space.

    Args:
      explorer: the search through it, not begun.
    """

    def __init__(self, explorer: RtpExplorer) -> None:
        self._explorer = explorer

    def run(self, progress: Progress) -> None:
        def told(report: Report, depth: int, share: float) -> None:
            rate = f"{report.rate(report.states):,.0f} states/s"
            progress(f"depth {depth}: {report.states:,} states, {report.transitions:,} transitions, {rate}", share)

        self._explorer.run(told)

    def found(self) -> Exploration:
        return self._explorer.report.exploration()
