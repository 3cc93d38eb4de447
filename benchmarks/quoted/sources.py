"""Every command and function that makes a figure of a document."""

from __future__ import annotations

from benchmarks.quoted import counts
from benchmarks.quoted.documents import sweep
from benchmarks.quoted.source import Cost, Source

NUMBER = r"([\d,.]+)"
DIFF = {"operations": rf"{NUMBER} operations$", "seeds": rf"{NUMBER} seeds each", "features": rf"in {NUMBER} features"}
PLANNED = {"planned": rf"^planned +{NUMBER}$", "refused": rf"^refused +{NUMBER}$"}
LAYOUTS = {
    "equal": rf"^equal +{NUMBER}$",
    "both": rf"^both refuse +{NUMBER}$",
    "nest": rf"^axes that do not nest +{NUMBER}$",
    "states": rf"^a kernel block too small for its states +{NUMBER}$",
}
EXPLORED = {
    "states": rf"^{NUMBER} states",
    "transitions": rf"{NUMBER} transitions, depth",
    "evict": rf"^{NUMBER}% evict",
    "refuse": rf"{NUMBER}% refuse$",
}
STEPPED = {
    "many": rf"many steps a dispatch.* {NUMBER} x │",
    "one": rf"one dispatch a step.* {NUMBER} x │",
    "many_ms": rf"many steps a dispatch *│ +{NUMBER} ",
    "one_ms": rf"one dispatch a step *│ +{NUMBER} ",
    "vllm_ms": rf"hashing and manager *│ +{NUMBER} ",
}
COMPILED = {
    f"{name}_{part}": rf"{row} *│ {'[^│]+│ ' * column}+{NUMBER} "
    for name, row in (
        ("run", "run, every operation"),
        ("reporting", "run, reporting ids and events"),
        ("schedule", "the schedule of hkv replay"),
    )
    for column, part in enumerate(("trace", "compile", "least"))
}
PAIRS = {
    "fewer": "tensor 4 -> tensor 2 ",
    "more": "tensor 2 -> tensor 4 ",
    "copies": "tensor 4 of 1 head -> tensor 4 ",
    "context": "tensor 4 -> context 4, by 16 ",
    "both": "tensor 4 -> tensor 2, context 2, by 1 ",
}
MOVED = {
    f"{name}_{way}": rf"^{row} *[\d.]+MiB +[\d.]+MiB +\d+ +[\d.]+ {'+[0-9.]+ ' * column}+{NUMBER}"
    for name, row in PAIRS.items()
    for column, way in enumerate(("plan", "arrays"))
}
RESHARDED = {
    **{f"{name}_sent": rf"^{row} *{NUMBER}MiB" for name, row in PAIRS.items()},
    **{f"{name}_forwarded": rf"^{row} *[\d.]+MiB +{NUMBER}MiB" for name, row in PAIRS.items()},
}
MUTATE = (
    "hkv mutate examples/toy_engine.py:ToyEngine.evict --by 'hkv watch examples/toy_engine.py:ToyEngine "
    "--kinds full_attention --max-groups 1 --version 1 --feature core --seeds 20'"
)

CAPACITY = (
    "hkv plan llama-3.1-8b mistral-nemo-12b qwen3-coder-480b-a35b gemma-3-27b gemma-4-31b gpt-oss-120b llama-4-scout "
    "command-a mimo-v2-flash minimax-m2.5 deepseek-v3.2 deepseek-v4-flash glm-5.2 kimi-k2.5 "
    "qwen3-next-80b-a3b qwen3.5-397b-a17b nemotron-3-super-120b-a12b granite-4.0-h-small jamba-v0.1 falcon-h1-7b "
    "--memory 80GiB --max-model-len 131072"
)
"""The table of released models in `docs/planning.md`."""

REPLAY = "hkv replay TRACE --json - --groups"
THREE = "full:16,swa:16:1024,swa:16:128"
BESIDE = "python benchmarks/replay.py --json - --vllm-python VLLM/bin/python --mode"
DIALECTS = "python benchmarks/dialects.py --json - --trace TRACE --repeats 5"
WHOLE = "--requests 12031 --num-blocks 50000 --compiled"

COUNTED = (
    Source("recorded logs", counts.recorded_logs),
    Source("recorded layouts", counts.recorded_layouts),
    Source("rtp-llm logs", counts.rtp_llm_logs),
    Source("models", counts.models),
    Source("causes", counts.hit_causes),
    Source("defect logs", counts.defect_logs),
    Source("declarations", counts.declarations),
)
"""Functions: a test makes them."""

COMMANDS = (
    Source("small hits", "python benchmarks/compare_hits.py --cases 0 --logs 0 --json -"),
    Source("small hits vllm", "VLLM/bin/python benchmarks/compare_hits.py --vllm --cases 0 --logs 0 --json -"),
    Source("hits", "python benchmarks/compare_hits.py --json -"),
    Source(
        "hits vllm",
        "VLLM/bin/python benchmarks/compare_hits.py --vllm --cases 30000 --logs 0 --json -",
        {},
        Cost.MINUTES,
    ),
    Source(
        "own tests",
        "VLLM/bin/python benchmarks/attach_own_tests.py TESTS --engines numpy,jax --json",
        {},
        Cost.MINUTES,
    ),
    Source("diff vllm", "VLLM/bin/python -m hkv diff --engines numpy,vllm --version 3 --seeds 1000", DIFF, Cost.HOURS),
    Source("diff jax", "hkv diff --engines numpy,jax --version 3 --seeds 1000", DIFF, Cost.HOURS),
    Source("planning", "VLLM/bin/python benchmarks/compare_planning.py --cases 4000", PLANNED, Cost.MINUTES),
    Source("planning models", "VLLM/bin/python benchmarks/compare_planning.py --models tests/data/models", PLANNED),
    Source("layouts", "VLLM/bin/python benchmarks/compare_layouts.py --cases 8000", LAYOUTS),
    Source("kills", "python tests/tier/kill_driver.py FOLDER"),
    Source("explore", "python benchmarks/explore.py --seconds 7200", EXPLORED, Cost.MINUTES),
    Source("capacity", CAPACITY, {"output": r"\A([\s\S]*)\Z"}),
    Source("stale key", "hkv check examples/data/stale_key.jsonl", {"output": r"\A([\s\S]*)\Z"}, status=1),
    Source("plant", "hkv explore --plant window-one-short", {"output": r"\A([\s\S]*)\Z"}, status=1, apart=True),
    Source("mutate toy", MUTATE, {"output": r"\A([\s\S]*)\Z"}, status=1),
    Source("mutants", "python -m tests.mutants --json -", {}, Cost.MINUTES),
    Source("late copy", "python -m tests.mutants --only hit-inside-a-block-of-this-step --json -"),
    Source("resharding", "python benchmarks/resharding.py --repeats 1", RESHARDED),
    Source("trace jax", f"{REPLAY} {THREE} --num-blocks 200000 --retention dense", {}, Cost.MINUTES),
    Source("trace numpy", f"{REPLAY} {THREE} --num-blocks 200000 --retention dense --engine numpy", {}, Cost.MINUTES),
    Source("trace vllm", f"{BESIDE} schedule --trace TRACE --repeats 1", {}, Cost.MINUTES),
)

REPLAYS = tuple(
    Source(name, f"{REPLAY} {arguments}", {}, Cost.MINUTES)
    for name, arguments in (
        ("12k vllm", "full:64 --num-blocks 12000"),
        ("12k rtp", "full:64 --num-blocks 12000 --dialect rtp-llm/single"),
        ("12k rtp unreserved", "full:64 --num-blocks 12000 --dialect rtp-llm/single --reserve-ratio 0"),
        ("50k vllm", "full:64 --num-blocks 50000"),
        ("50k rtp", "full:64 --num-blocks 50000 --dialect rtp-llm/single"),
        ("50k rtp from the back", "full:64 --num-blocks 50000 --dialect rtp-llm/hybrid-pool"),
        ("all vllm", "full:64 --num-blocks 900000 --limit 4000"),
        ("all rtp", "full:64 --num-blocks 900000 --limit 4000 --dialect rtp-llm/single"),
        ("20k vllm", "full:64 --num-blocks 20000 --limit 1000"),
        ("20k rtp", "full:64 --num-blocks 20000 --limit 1000 --dialect rtp-llm/single"),
        ("20k rtp from the back", "full:64 --num-blocks 20000 --limit 1000 --dialect rtp-llm/hybrid-pool"),
        ("20k rtp tree", "full:64 --num-blocks 20000 --limit 1000 --dialect rtp-llm/hybrid-pool --prefix-tree"),
        ("states vllm", "full:64,mamba:64 --num-blocks 50000 --retention dense"),
        ("states rtp", "full:64,mamba:64 --num-blocks 50000 --dialect rtp-llm/hybrid"),
        ("states rtp 8", "full:64,mamba:64 --num-blocks 50000 --dialect rtp-llm/hybrid --linear-step 8"),
        ("all states vllm", "full:64,mamba:64 --num-blocks 900000 --limit 4000 --retention dense"),
        (
            "all states rtp 8",
            "full:64,mamba:64 --num-blocks 900000 --limit 4000 --dialect rtp-llm/hybrid --linear-step 8",
        ),
        ("1500 vllm", "full:64 --num-blocks 1500 --limit 500"),
        ("1500 rtp", "full:64 --num-blocks 1500 --limit 500 --dialect rtp-llm/single"),
    )
)

TIMED = tuple(
    Source(name, command, reads, Cost.MINUTES, timed=True)
    for name, command, reads in (
        ("speed prompts", f"{BESIDE} prompts --trace TRACE --requests 1000", {}),
        ("speed schedule", f"{BESIDE} schedule --trace TRACE --requests 1000", {}),
        ("speed stress", f"{BESIDE} stress", {}),
        ("speed whole trace", "python benchmarks/replay.py --json - --mode schedule --trace TRACE", {}),
        ("speed dialects", f"{DIALECTS} --groups full:64", {}),
        ("speed dialects states", f"{DIALECTS} --groups full:64,mamba:64", {}),
        ("speed dialects whole", f"{DIALECTS} {WHOLE} --groups full:64", {}),
        ("speed dialects whole states", f"{DIALECTS} {WHOLE} --groups full:64,mamba:64", {}),
        ("speed scaling", "python benchmarks/replay.py --json - --mode scaling", {}),
        ("speed steps", "python benchmarks/step.py --vllm-python VLLM/bin/python", STEPPED),
        ("speed compilation", "python benchmarks/compilation.py --repeats 3", COMPILED),
        ("speed resharding", "python benchmarks/resharding.py --repeats 25", MOVED),
        (
            "speed explore",
            "python benchmarks/explore.py",
            {
                "seconds": rf"^{NUMBER} s after",
            },
        ),
    )
)

SWEPT_SIZES = "--memory 40GiB..640GiB:3 --max-model-len 131072 --bounds --json -"
SWEEPS = tuple(
    Source(name, f"hkv sweep TRACE --model {model} {SWEPT_SIZES} {rules}", {}, Cost.MINUTES)
    for name, model, rules in (
        *((f"sweep {model}", model, "--retention 0,dense --device h100") for model in sweep.MODELS),
        *((f"sweep {m} rtp", m, "--dialect rtp-llm/hybrid-pool --max-running 1024") for m in sweep.RTP_MODELS),
    )
)

MISSES = tuple(
    Source(
        f"misses {model}",
        f"hkv replay TRACE --model {model} --memory 160GiB --device h100 --max-model-len 131072 --json -",
        {},
        Cost.MINUTES,
    )
    for model in sweep.MODELS
)

SOURCES = {source.name: source for source in (*COUNTED, *COMMANDS, *REPLAYS, *SWEEPS, *MISSES, *TIMED)}
