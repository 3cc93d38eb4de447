"""Figures that the project's own files and declarations have: nothing runs but Python."""

from __future__ import annotations

import collections
import dataclasses
import json
from typing import Any

from benchmarks import model_tables
from benchmarks.compare_layouts import OUTCOMES, outcome
from benchmarks.quoted.source import ROOT
from hkv.chunks.formats import EngineKVFormat
from hkv.dialects.vllm.explorer.judges import JUDGES
from hkv.dialects.vllm.traffic.hit_comparison import Cause
from hkv.model.group_policy import GroupPolicy
from hkv.model.released import released_models
from hkv.oracle.log_file import read_log
from reference.dialects.rules import Rules

DATA = ROOT / "tests" / "data"


def recorded_logs() -> dict[str, Any]:
    """Logs of an installed vLLM that the tests check."""
    return {"logs": len(list((DATA / "oplogs").glob("*.jsonl")))}


def rtp_llm_logs() -> dict[str, Any]:
    """Logs of RTP-LLM's own engine that the tests check, and their operations."""
    logs = [read_log(path) for path in sorted((DATA / "rtp_llm").glob("*.jsonl"))]
    return {"logs": len(logs), "operations": sum(len(log.operations) for log in logs)}


def recorded_layouts() -> dict[str, Any]:
    """Numbers of outcomes of the layouts that were recorded from vLLM 0.33."""
    records = json.loads((DATA / "layouts" / "vllm-0.33.json").read_text())
    counts = collections.Counter(outcome(record["case"], record["answer"]) for record in records)
    equal, both, *alone, different = (counts[name] for name in OUTCOMES)
    return {"cases": len(records), "equal": equal, "both": both, "alone": sum(alone), "different": different}


def models() -> dict[str, Any]:
    """Numbers of configs that the tests have, and of released models."""
    return {"models": len(model_tables.names()), "released": len(released_models())}


def hit_causes() -> dict[str, Any]:
    """Number of causes for which the engine's iteration may leave the definition of a hit, by direction."""
    directions = collections.Counter(cause.direction for cause in Cause)
    return {"causes": len(Cause), **directions}


def defect_logs() -> dict[str, Any]:
    """The logs that show known defects."""
    logs = [read_log(path) for path in sorted((ROOT / "docs" / "upstream-bugs").glob("*.jsonl"))]
    return {"logs": len(logs), "operations": max(len(log.operations) for log in logs)}


def declarations() -> dict[str, Any]:
    """Numbers of fields and members of some declarations."""
    return {
        "chunk_formats": len(EngineKVFormat),
        "rules": len(dataclasses.fields(Rules)),
        "policy_fields": len(dataclasses.fields(GroupPolicy)),
        "explored_invariants": len(JUDGES),
    }
