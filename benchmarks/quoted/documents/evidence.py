"""Claims of `docs/evidence.md` about what has been shown, and of the README."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.quoted.claim import Claim, Output, Spread
from benchmarks.quoted.sources import CAPACITY

DOCUMENT, README, PLANNING = "docs/evidence.md", "README.md", "docs/planning.md"
TRACE = (
    "{requests} chat requests, {prompt_tokens} prompt tokens, {groups} groups, {blocks} blocks: "
    "{hit_tokens} hit tokens with"
)
STATES = "has {states} states up to renaming, {transitions} transitions between them; {invariants} invariants hold"
PLANS = (
    "Of {cases} random sets of layers both plan {planned} alike and refuse {refused}; of {settings} settings of "
    "{models} models in six layouts both plan {models_planned} alike and refuse {models_refused}"
)
LAYOUTS = (
    "Of {cases} random layouts an installed vLLM lays out {equal} alike and refuses {both} as HKV does; the other "
    "{alone} HKV alone refuses"
)
SPEED = (
    "a whole overlapping schedule at {schedule_least} to {schedule_most} times its speed, prompts one at a time at "
    "{prompts_least} to {prompts_most} times, a stress of duplicate keys at {stress_least} to {stress_most} times"
)


def _totals(made: Mapping[str, Any]) -> dict[str, Any]:
    """Totals of a replay of the whole trace."""
    totals = made["totals"]
    assert totals["finished"] == totals["requests"], "some requests were refused"
    return {
        "requests": totals["requests"],
        "prompt_tokens": totals["prompt_tokens"],
        "hit_tokens": totals["hit_tokens"],
        "groups": len(made["groups"]),
        "blocks": totals["blocks"] + 1,
    }


def _beside(made: Mapping[str, Any]) -> dict[str, Any]:
    """Figures of a replay next to vLLM's manager."""
    assert made["same_decisions"]
    return {
        "requests": made["requests"],
        "prompt_tokens": made["prompt_tokens"],
        "hit_tokens": made["hit_tokens"],
        "groups": len(made["groups"].split(",")),
        "blocks": made["num_blocks"],
    }


def _layouts(made: Mapping[str, Any]) -> dict[str, Any]:
    counts = {name: int(made[name].replace(",", "")) for name in ("equal", "both", "nest", "states")}
    alone = counts["nest"] + counts["states"]
    return {
        "equal": counts["equal"],
        "both": counts["both"],
        "alone": alone,
        "cases": counts["equal"] + counts["both"] + alone,
    }


def _plans(sets: Mapping[str, Any], models: Mapping[str, Any], counted: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "planned": sets["planned"],
        "refused": sets["refused"],
        "cases": int(sets["planned"]) + int(sets["refused"]),
        "models_planned": models["planned"],
        "models_refused": models["refused"],
        "settings": int(models["planned"]) + int(models["refused"]),
        "models": counted["models"],
    }


def _speed(prompts: Mapping[str, Any], schedule: Mapping[str, Any], stress: Mapping[str, Any]) -> dict[str, Any]:
    sides = {"prompts": prompts, "schedule": schedule, "stress": stress}
    assert all(side["same_decisions"] for side in sides.values())
    return {name: side["ratio"]["median"] for name, side in sides.items()}


def _own_tests(made: Mapping[str, Any]) -> Mapping[str, Any]:
    assert set(made["agree"].values()) == {made["complete"]}, "a log is not what an engine says"
    return {name: made[name] for name in ("managers", "logs", "complete")}


def _diff(made: Mapping[str, Any]) -> Mapping[str, Any]:
    return {name: made[name] for name in ("features", "seeds", "operations")}


LOCKSTEP = (
    "Random lock-step traffic over {features} features, {seeds} seeds each, {operations} operations: no difference"
)

CLAIMS = (
    Claim(DOCUMENT, LOCKSTEP, ("diff vllm",), _diff),
    Claim(DOCUMENT, LOCKSTEP, ("diff jax",), _diff),
    Claim(DOCUMENT, "{logs} recorded logs in `tests/data/oplogs`", ("recorded logs",), lambda made: made),
    Claim(
        DOCUMENT,
        "{logs} logs recorded from its own C++ (main, 20 August 2026), {operations} operations",
        ("rtp-llm logs",),
        lambda made: made,
    ),
    *(Claim(DOCUMENT, TRACE, (source,), _totals) for source in ("trace jax", "trace numpy")),
    Claim(DOCUMENT, TRACE, ("trace vllm",), _beside),
    Claim(
        DOCUMENT,
        "over {caches} small caches enumerated",
        ("small hits",),
        lambda made: {"caches": made["small"]["caches"]},
    ),
    Claim(DOCUMENT, "and {cases} drawn: equal", ("hits",), lambda made: {"cases": made["random"]["total"]}),
    Claim(DOCUMENT, "except for {causes} named causes", ("causes",), lambda made: {"causes": made["causes"]}),
    Claim(DOCUMENT, PLANS, ("planning", "planning models", "models"), _plans),
    Claim(DOCUMENT, LAYOUTS, ("layouts",), _layouts),
    Claim(
        DOCUMENT,
        "{cases} layouts and the chunk objects equal what vLLM 0.33",
        ("recorded layouts",),
        lambda made: {"cases": made["cases"]},
    ),
    Claim(
        DOCUMENT,
        SPEED,
        ("speed prompts", "speed schedule", "speed stress"),
        _speed,
        {name: Spread(f"{name}_least", f"{name}_most") for name in ("prompts", "schedule", "stress")},
    ),
    Claim(
        DOCUMENT,
        "Of the {managers} cache managers that vLLM 0.33.0's own `tests/v1/core` make, {logs} are recorded by HKV's "
        "plugin; {complete} logs are complete",
        ("own tests",),
        _own_tests,
    ),
    Claim(
        DOCUMENT,
        STATES,
        ("explore", "declarations"),
        lambda made, code: {
            "states": made["states"],
            "transitions": made["transitions"],
            "invariants": code["explored_invariants"],
        },
    ),
    Claim(
        DOCUMENT,
        "at every system call, {kills} times, never returned anything wrong",
        ("kills",),
        lambda made: {"kills": made["kills"] if not made["wrong"] else 0},
    ),
    Claim(README, "counts of {models} released models", ("models",), lambda made: {"models": made["released"]}),
    Output(README, "hkv check examples/data/stale_key.jsonl", ("stale key",)),
    Claim(PLANNING, "knows {models} released models by name", ("models",), lambda made: {"models": made["released"]}),
    Output(PLANNING, CAPACITY, ("capacity",)),
)
