"""Evidence that each option of each command does something: an argument that changes the result, or that is refused.

A row is a command line, and what is added to it. `tests/cli/test_options.py` wants a row for every option, so that
none can be accepted and ignored.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from hkv.cli import shrink
from hkv.dialects.vllm.explore_command import planted
from hkv.oracle.record import differ

CHANGES, REFUSED = "changes", "is refused"

MODEL = "tests/data/models/qwen3_next.json"
SMALL_MODEL = "tests/data/models/llama.json"
LOG = "tests/data/oplogs/eagle-12.jsonl"
NUMPY = "hkv.dialects.vllm.engines.numpy:NumpyEngine"

SILENT = "cmd:sort"
"""A process that answers nothing, and ends as soon as its input does."""

SPIED: dict[str, Any] = {"planted": planted, "differ": differ, "Shrinker": shrink.Shrinker}
"""Functions that the test replaces, as they are."""


@dataclasses.dataclass(frozen=True)
class Row:
    """A command line, an option with its value that is put behind it, and what is expected of that."""

    base: tuple[str, ...]
    option: str
    value: tuple[str, ...]
    expected: str

    @property
    def title(self) -> str:
        """For test ids."""
        return " ".join((self.base[0], *self.base[1:3], self.option, *self.value))


def _rows(base: str, changes: str = "", refused: str = "") -> list[Row]:
    """Rows of one base; each `--option value` is an item of `changes` or `refused`, between `;`."""
    rows = []
    for text, expected in ((changes, CHANGES), (refused, REFUSED)):
        for item in filter(None, (part.split() for part in text.split(";"))):
            rows.append(Row(tuple(base.split()), item[0], tuple(item[1:]), expected))
    return rows


OFFLOAD = (
    "--offload 9;--offload-policy arc;--offload-store-threshold 2;--offload-decode;--offload-bandwidth 1GB/s;"
    "--offload-transfer-ms 9;--no-offload-defects;"
    "--prefill-tokens-per-second 9;--offload-kind lmcache;--offload-chunk-tokens 64"
)
"""Options of a second tier."""

PLAN = f"plan {MODEL} --memory 80GiB"
PLAN_RTP = f"plan {SMALL_MODEL} --memory 80GiB --dialect rtp-llm"
PLAN_RTP_POOLS = "plan tests/data/models/deepseek_v4.json --memory 80GiB --dialect rtp-llm --pools independent --json -"
PLAN_SMALL = f"plan {SMALL_MODEL} --memory 3GiB --max-model-len 1024"
PLAN_EXPERTS = "plan tests/data/models/gpt_oss.json --memory 80GiB"
PLAN_WINDOWS = "plan tests/data/models/gemma3_text.json --memory 80GiB"
DRAFT = "tests/data/models/llama.json"
MUTATE = ("mutate", "hkv.limits", "--by", "python -c 'import hkv.limits'", "--sample", "1")

REPLAY = "replay {in}/trace.jsonl --tokens-per-id 16 --json - --engine numpy --groups full:16,swa:16:64 --num-blocks 60"
REPLAY_MODEL = (
    f"replay {{in}}/trace.jsonl --tokens-per-id 16 --json - --engine numpy --model {SMALL_MODEL} --memory 3GiB"
)
REPLAY_TIER = f"{REPLAY_MODEL.replace('3GiB', '160MiB')} --max-model-len 256 --offload 1GiB"
REPLAYED = "replay {in}/trace.jsonl --tokens-per-id 16 --json - --engine numpy"
REPLAY_RTP = f"{REPLAYED} --dialect rtp-llm/hybrid --groups full:16,mamba:16 --num-blocks 60"
REPLAY_RTP_MODEL = f"{REPLAYED} --dialect rtp-llm/single --model {SMALL_MODEL} --memory 3GiB"
SCHEDULE = (
    "--limit 4;--step-ms 500;--speed 1/100;--step-tokens 32;--decode-tokens 5;--max-running 2;"
    "--max-model-len 80;--closed-loop 1;--no-caching;--warmup 2;--ceilings;--json {out}/out.json;--plot {out}/out.svg;"
    "--html {out}/page.html;--perfetto {out}/trace.json;"
)

TRACE = "trace {workload} -o {{out}}/new.jsonl --requests 20"
WORKLOAD = (
    "--seed 7;--requests 30;--rate 0.5;--prefixes 1;--prefix-tokens 30;--prompt-tokens 30;--output-tokens 30;"
    "--max-tokens 300;--format tokens;--tokens-per-id 100;--json -;-o {out}/other.jsonl;"
)
IMPORT = "trace import {{in}}/{source} --from {format} -o {{out}}/new.jsonl"
DIFF = "diff --engines numpy,numpy --seeds 1 --steps 2 --feature core"
DIFF_RTP = "diff --engines numpy,numpy --seeds 1 --steps 2 --dialect rtp-llm/hybrid --feature fork"
RECORD = "record --engine numpy --feature core --seed 4 -o {out}/new.jsonl"
RECORD_RTP = "record --engine numpy --dialect rtp-llm/hybrid --feature fork --seed 7 -o {out}/new.jsonl"
EXPLORE_RTP = (
    "explore --dialect rtp-llm/hybrid --groups full:1,mamba:1 --requests 1 --max-model-len 2 --json - "
    "--limit-states 150"
)
FULL, MAMBA, OPAQUE = "layout --spec full:16", "layout --spec mamba:16", "layout --spec opaque:16"
SHARED_LAYOUT = (
    "--page-size 1048576;--layout HND;--num-blocks 5;--num-layers 3;--layer-stride 67108864;--block-stride 4194304;"
    "--offset 512;--byte 7;--image {out}/out.svg;--json -;"
)

KERNELS = "check-kernel tests/testing/kernels/planted.py"

ROWS = [
    *_rows(
        f"{KERNELS}:only_keys_zeroed --operation zero --json - -o {{out}}/case.json",
        "--draws 2;--seed 1;--supports dtypes=bfloat16;--list;--output {out}/other.json;--json {out}/told.json",
        "--device cuda;--case tests/data/models/llama.json;--supports speed=9;--operation pack;--timeout 0",
    ),
    *_rows(
        PLAN,
        "--memory 40GiB;--tp 2;--pp 2;--block-size 1088;--kernel-block-size 16;--layout BLNHC;--dtype float32;"
        "--kv-dtype fp8;--state-dtype float32;--max-model-len 4096;--csv {out}/out.csv;--plot {out}/out.svg;"
        "--speculative-tokens 2;--no-prefix-caching;--num-gpu-blocks-override 4000;--max-num-batched-tokens 4096;"
        "--prefix-match-unit 32;--max-num-seqs 7;--kv-offloading-size 7;--json -",
        "--draft-modules 1;--draft-modules 2;--pools independent;--bugs no-such-bug;--bugs window-one-never-hits;"
        "--role decode;--prefill-ranks 2;--linear-step 2;--pinned-pools;--explicit-blocks full=7;--reserve-ratio 5",
    ),
    *_rows(f"plan {SMALL_MODEL} --memory 80GiB", "--dialect rtp-llm"),
    *_rows(PLAN_SMALL, "--prompt 200;--trace {in}/long.jsonl", "--shared 60%"),
    *_rows(
        f"{PLAN_SMALL} --prompt 200",
        "--answer 90;--shared 90%;--requests-per-second 9;--target-hit-rate 99%;--target-hit-rate 1%",
        "--kv-offloading-size 7",
    ),
    *_rows("plan tests/data/models/deepseek_v3.json --memory 80GiB --tp 2", "--dcp 2"),
    *_rows(
        f"{PLAN_WINDOWS} --json -",
        "--max-in-flight 64;--no-hybrid;--no-async-scheduling;--device a100;--usage-context LLM_CLASS;"
        "--performance-mode throughput;--no-enable-chunked-prefill",
    ),
    *_rows(f"{PLAN_EXPERTS} --json - --dp 2 --all2all-backend nixl_ep", "--ep"),
    *_rows(f"{PLAN_EXPERTS} --json - --ep --all2all-backend nixl_ep", "--dp 2"),
    *_rows(f"{PLAN_EXPERTS} --json - --dp 2 --ep", "--all2all-backend nixl_ep"),
    *_rows("plan tests/data/models/qwen3_next.json --memory 80GiB --json -", "--gdn-prefill-backend triton"),
    *_rows("plan kimi-k3 --memory 80GiB --json -", "--kda-prefill-backend triton"),
    *_rows(PLAN, "--layers tests/data/layer_list.json"),
    *_rows(
        f"plan {MODEL} --gpu-memory 80GiB --weights 20GiB --activations 4GiB",
        "--gpu-memory 90GiB;--gpu-memory-utilization 0.8;--weights 10GiB;--activations 3GiB;--requests 7",
    ),
    *_rows(f"plan {MODEL} --memory 80GiB", '--speculative-config {"method":"ngram","num_speculative_tokens":3}'),
    *_rows(PLAN_WINDOWS, f"--draft {DRAFT}"),
    *_rows("plan {in}/unknown-field.json --memory 80GiB", "--ignore-field a_field_that_nobody_reads", "--strict"),
    *_rows("plan tests/data/models/deepseek_v4.json --memory 80GiB --no-hybrid", "--bugs latent-window-promotion"),
    *_rows(f"{PLAN_RTP} --draft {DRAFT}", "--draft-modules 2"),
    *_rows(
        PLAN_RTP,
        "--memory 40GiB;--tp 2;--dcp 2;--block-size 16;--kernel-block-size 16;--dtype float32;--kv-dtype fp8;"
        f"--draft {DRAFT};--pools independent;--dialect vllm-0.33;--layers tests/data/layer_list.json;--json -;"
        "--max-model-len 4096;--csv {out}/out.csv;--plot {out}/out.svg",
        "--pp 2;--layout BLNHC;--max-model-len auto;--max-in-flight 64;--max-in-flight 8192;"
        "--no-enable-prefix-caching;--disable-hybrid-kv-cache-manager;--bugs x;--draft-modules 1;--draft-modules 2;"
        "--device h100;--gpu-memory 80GiB;--gpu-memory-utilization 0.9;--weights 1GiB;--activations 1GiB;"
        "--num-gpu-blocks-override 7;--max-num-seqs 7;--max-num-batched-tokens 4096;--async-scheduling;"
        "--kv-offloading-size 7;"
        "--enable-chunked-prefill;--performance-mode balanced;--usage-context LLM_CLASS;--speculative-config {};"
        "--prefix-match-unit 16;--dp 2;--ep;--all2all-backend moonep;--gdn-prefill-backend triton;"
        "--kda-prefill-backend triton;--trace {in}/trace.jsonl;--prompt 300;--answer 20;--shared 50%;"
        "--requests-per-second 5;"
        "--target-hit-rate 50%",
    ),
    *_rows(
        "plan {in}/unknown-field.json --memory 80GiB --dialect rtp-llm",
        "--ignore-field a_field_that_nobody_reads",
        "--strict",
    ),
    *_rows(f"{PLAN_RTP} --max-model-len 4096", "--reserve-ratio 50;--requests 7"),
    *_rows(
        PLAN_RTP_POOLS,
        "--role decode;--linear-step 4;--pinned-pools;--explicit-blocks hca_state=50",
        "--explicit-blocks hca_state;--explicit-blocks other=7;--prefill-ranks 4",
    ),
    *_rows(f"{PLAN_RTP_POOLS} --role decode", "--prefill-ranks 4"),
    *_rows(
        f"plan {MODEL} --memory 80GiB --dialect rtp-llm --block-size 1088",
        "--state-dtype float32;--speculative-tokens 2",
    ),
    *_rows(
        REPLAY,
        f"{SCHEDULE}--groups full:16;--num-blocks 80;--eagle all;--retention dense;--lookahead 3;--prefix-match-unit 8",
        "--memory 1GiB;--tp 1;--block-size 16;--kv-dtype auto;--draft x;--dialect rtp-llm/single;--linear-step 1;"
        f"--reserve-ratio 5;--prefix-tree;--independent-eviction;--model {SMALL_MODEL};--check;"
        "--swa-full-tokens-ratio 1;--schedule-policy fcfs",
    ),
    *_rows(
        f"{REPLAY} --offload 14",
        "--offload 9;--offload-policy arc;--offload-store-threshold 2;--offload-decode;--offload-kind lmcache",
        "--offload-chunk-tokens 64;--offload-bandwidth 1GB/s;--offload-transfer-ms 9;--prefill-tokens-per-second 9;"
        "--eagle all;--no-caching;--offload 1GiB",
    ),
    *_rows(REPLAY, "--offload 40", "--offload-policy arc;--offload-decode;--no-offload-defects"),
    *_rows(
        f"{REPLAY} --offload 14 --eagle all --lookahead 2",
        "--lookahead 3",
        "--decode-tokens 4;--engine jax;--offload-kind lmcache",
    ),
    *_rows(
        f"{REPLAY} --offload 14".replace("swa:16:64", "mamba:16"),
        "--prefix-match-unit 8",
        "--prefix-match-unit 5",
    ),
    *_rows(
        f"{REPLAY} --offload 40 --offload-kind lmcache --offload-chunk-tokens 64",
        "--offload-chunk-tokens 16",
        "--offload-policy arc;--offload-store-threshold 2;--no-offload-defects",
    ),
    *_rows(REPLAY_TIER, "--offload-bandwidth 100MB/s", "--prefill-tokens-per-second 9;--offload 1"),
    *_rows(f"{REPLAY_TIER} --offload-bandwidth 100MB/s", "--offload-transfer-ms 500;--prefill-tokens-per-second 9"),
    *_rows(f"{REPLAY} --retention dense", "--engine {in}/wrong.py:Blind"),  # so that there are hits not to see
    *_rows("replay {in}/long.jsonl --json - --engine numpy --groups full:16 --num-blocks 2000", "--device a100"),
    *_rows(REPLAY.replace("per-id 16", "per-id 512"), "--tokens-per-id 16"),
    *_rows(REPLAY_RTP.replace("per-id 16", "per-id 512"), "--tokens-per-id 16"),
    *_rows(REPLAY.replace("numpy", "{in}/wrong.py:Wrong"), "--check"),
    *_rows(
        REPLAY_MODEL,
        f"{SCHEDULE}--memory 4GiB;--tp 2;--block-size 32;--kv-dtype fp8;--eagle all;--draft {DRAFT}",
        "--num-blocks 7;--linear-step 1;--independent-eviction",
    ),
    *_rows(
        REPLAY_RTP,
        f"{SCHEDULE}--groups full:16,swa:16:17;--num-blocks 80;--linear-step 2;--reserve-ratio 50;"
        "--prefix-tree;--lookahead 20",
        "--independent-eviction;--eagle all;--retention 0;--prefix-match-unit 8;--device a100;--draft x;--memory 1GiB;"
        "--tp 1;--block-size 16;--kv-dtype auto;--check;--engine no-such;--dialect rtp-llm/single;"
        f"--model {SMALL_MODEL};{OFFLOAD}",
    ),
    *_rows(
        f"{REPLAY_RTP} --prefix-tree".replace("mamba:16 --num-blocks 60", "swa:16:17 --num-blocks 40"),
        "--independent-eviction",
    ),
    *_rows(
        f"{REPLAYED} --dialect sglang-0.5.23 --groups full:16,swa:16:64 --num-blocks 60",
        "--swa-full-tokens-ratio 9;--schedule-policy replay",
    ),
    *_rows(
        REPLAY_RTP_MODEL,
        f"{SCHEDULE}--memory 4GiB;--tp 2;--block-size 32;--kv-dtype fp8;--reserve-ratio 90",
        "--num-blocks 7;--eagle all;--retention 0;--draft x",
    ),
    *_rows(TRACE.format(workload="chat"), f"{WORKLOAD}--turns 2;--pause 1", "--branch-percent 90"),
    *_rows(TRACE.format(workload="agentic"), f"{WORKLOAD}--turns 2;--pause 1;--branch-percent 90"),
    *_rows(TRACE.format(workload="shared-prefix"), WORKLOAD, "--turns 2;--pause 1;--branch-percent 90"),
    *_rows(
        "compare {in}/trace.jsonl --engine numpy --jobs 1 --groups full:16;full:96 --num-blocks 2000",
        "--requests 0;--plot {out}/out.svg;--html {out}/page.html;--json -",
        "--jobs 0",
    ),
    *_rows(
        "sweep {in}/trace.jsonl --engine numpy --jobs 1 --groups full:16,swa:16:64 --num-blocks 40..80:2",
        "--target 5;--bounds;--results {out}/results.jsonl;--csv {out}/points.csv;--plot {out}/out.svg;"
        "--html {out}/page.html;--json -",
        "--jobs 0;--ray local;--cost-ratio 9",
    ),
    *_rows(
        "sweep {in}/trace.jsonl --engine numpy --jobs 1 --groups full:16,swa:16:64 --num-blocks 40..80:2 "
        "--offload 40,90 --plot {out}/out.svg",
        "--cost-ratio 9",
    ),
    *_rows(
        IMPORT.format(source="mooncake.jsonl", format="mooncake"),
        "--from timed-trace;--tokens-per-id 16;--tokens-per-id 40;--limit 1;--json -;-o {out}/other.jsonl",
        "--tokenizer {in}/tokenizer.json;--template chatml;--output-tokens 1;--answers {in}/answers.jsonl;--rate 1;"
        "--seed 1;--ms-per-token 1;--pause 1;--synthetic shared-prefix;--prefixes 1;--prefix-tokens 1;--group 1;"
        "--endpoint tcp://127.0.0.1:1;--replay-endpoint tcp://127.0.0.1:1;--topic kv;--seconds 1;--step-ms 7",
    ),
    *_rows(
        f"{IMPORT.format(source='dynamo.jsonl', format='dynamo')} --rate 1",
        "--rate 3;--seed 5;--ms-per-token 100",
        "--pause 1",
    ),
    *_rows(
        f"{IMPORT.format(source='azure.csv', format='azure')} --synthetic shared-prefix",
        "--prefixes 1;--prefix-tokens 32;--seed 5;--tokens-per-id 8",
        "--rate 1",
    ),
    *_rows(IMPORT.format(source="azure.csv", format="azure"), "--synthetic shared-prefix", "--prefixes 2;--seed 1"),
    *_rows(
        f"{IMPORT.format(source='chats.json', format='sharegpt')} --rate 1 --tokenizer {{in}}/tokenizer.json",
        "--tokenizer {in}/other-tokenizer.json;--template chatml;--pause 3;--ms-per-token 1;--tokens-per-id 2",
        "--output-tokens 3",
    ),
    *_rows(
        f"{IMPORT.format(source='batch.jsonl', format='openai-batch')} --rate 1 --tokenizer {{in}}/tokenizer.json",
        "--output-tokens 9;--answers {in}/answers.jsonl",
        "--pause 3",
    ),
    *_rows(IMPORT.format(source="groups.jsonl", format="kv-events"), "--group 1", "--topic kv;--seconds 1"),
    *_rows(
        "trace import --from kv-events -o {out}/new.jsonl --endpoint tcp://127.0.0.1:1 --seconds 2",
        "--endpoint tcp://127.0.0.1:2;--replay-endpoint tcp://127.0.0.1:3;--topic kv;--seconds 3",
    ),
    *_rows(IMPORT.format(source="rtp.jsonl", format="operation-log"), "--step-ms 7"),
    *_rows(f"check {LOG}", f"--engine {NUMPY};--coverage;--json -;--junit -", "--bugs no-such-bug;--timeout 5"),
    *_rows(f"check {LOG}", "--html {out}/page.html"),
    *_rows(f"check {LOG}", "--invariants", "--fail-on no-such-verdict"),
    *_rows(f"check {LOG} --coverage", "", "--follow 1"),
    *_rows("check tests/data/question_without_answers.jsonl", "--fill -"),
    *_rows(f"check {LOG} --invariants", "", "--engine numpy;--bugs window-one-never-hits"),
    *_rows(
        "watch numpy --seeds 1 --steps 2 --feature core",
        "--seeds 2;--first-seed 3;--feature eagle;--kinds mamba;--max-groups 1;--version 2;--steps 3;--json -;"
        "--html {out}/page.html;--dialect rtp-llm/hybrid",
        "--timeout 5;--serve 0.0.0.0:0;--log tests/data/oplogs/eagle-12.jsonl",
    ),
    *_rows(
        "watch examples/wrong_engine.py:WrongEngine --kinds full_attention --max-groups 1 --version 1 --feature core",
        "--no-shrink;--save {out}/saved",
    ),
    *_rows(f"watch {SILENT} --seeds 1 --steps 2 --feature core --timeout 0.1", "--timeout 0.2"),
    *_rows(
        "check {in}/rtp.jsonl",
        "--engine hkv.dialects.rtp_llm.engines.numpy:RtpNumpyEngine;--coverage;--json -",
        "--bugs window-one-never-hits;--timeout 5",
    ),
    *_rows("check docs/upstream-bugs/window-one-never-hits.jsonl", "--bugs window-one-never-hits"),
    *_rows(f"check {LOG} --timeout 0.1 --engine {SILENT}", "--timeout 0.2"),
    *_rows(
        DIFF,
        f"--engines numpy,{NUMPY};--seeds 2;--first-seed 3;--feature eagle;--kinds mamba;"
        "--max-groups 1;--version 2;--steps 3;"
        "--ids isomorphic;--bugs window-one-never-hits;--json -;--html {out}/page.html;--dialect rtp-llm/hybrid",
        "--timeout 5;--ray 127.0.0.1:1;--known no-such-bug",
    ),
    *_rows(
        DIFF_RTP,
        "--seeds 2;--first-seed 3;--steps 3;--json -",
        "--version 1;--bugs window-one-never-hits;--timeout 5;--ids isomorphic",
    ),
    *_rows(
        "diff --engines {in}/wrong.py:Wrong,numpy --seeds 1 --steps 4 --feature core",
        "--definition {in}/wrong.py:Wrong;--no-shrink;--save {out}/saved;--html {out}/page.html",
    ),
    *_rows(f"diff --engines {SILENT},numpy --seeds 1 --steps 2 --feature core --timeout 0.1", "--timeout 0.2"),
    *_rows(
        RECORD,
        f"--engine {NUMPY};--seed 2;--feature eagle;--kinds mamba;--max-groups 1;--version 1;--steps 3;--json -;"
        "-o {out}/other.jsonl;--html {out}/page.html;--dialect rtp-llm/hybrid",
        "--timeout 5",
    ),
    *_rows(
        RECORD_RTP,
        "--seed 2;--steps 3;--json -;--dialect rtp-llm/hybrid-pool",
        "--timeout 5;--version 1",
    ),
    *_rows(f"record --engine {SILENT} --timeout 0.1 --feature core --seed 1 -o {{out}}/new.jsonl", "--timeout 0.2"),
    *_rows(
        "shrink tests/data/oplogs/core-0.jsonl -o {out}/small.jsonl --engine {in}/wrong.py:Wrong",
        f"--engine {{in}}/wrong.py:Worse;--against {NUMPY};--ids isomorphic;-o {{out}}/s.jsonl;--json -;"
        "--html {out}/page.html",
        "--timeout 5",
    ),
    *_rows(f"shrink {LOG} -o {{out}}/small.jsonl --engine {SILENT} --timeout 0.1", "--timeout 0.2"),
    *_rows(f"explain {LOG} --line 24", "--line 25;--request r1;--json -;--html {out}/page.html"),
    *_rows(
        FULL,
        SHARED_LAYOUT + "--spec mla:16;--kv-heads 2;--head-size 64;--head-size-v 64;--dtype float32;"
        "--quantization fp8_per_token_head;"
        "--tokens-per-state 2;--alignment 12288;--kernel-block-size 4;--address 0,1,0,3,5",
        "--state 4x4:float32;--entry-bytes 1",
    ),
    *_rows(FULL, "", "--layer 1;--tag full;--pool 1"),
    *_rows(
        "layout --plan {in}/plan.json",
        "--plan {in}/other-plan.json;--layer 1;--tag full;--byte 7;--json -",
        "--spec full:16;--num-layers 3;--layer 99;--tag other",
    ),
    *_rows("layout --plan {in}/plan.json --byte 7", "--pool 1"),
    *_rows(
        MAMBA,
        SHARED_LAYOUT + "--state 4x4:float32;--address 0,1,0,0,0",
        "--kv-heads 1;--head-size 64;--head-size-v 64;--dtype float32;--quantization x;"
        "--tokens-per-state 2;--alignment 16;--entry-bytes 2",
    ),
    *_rows(
        OPAQUE,
        SHARED_LAYOUT + "--entry-bytes 2",
        "--kv-heads 1;--head-size 64;--head-size-v 64;--dtype float32;--quantization x;"
        "--tokens-per-state 2;--alignment 16;"
        "--state 4x4:float32",
    ),
    *_rows(
        "explore",
        "--groups full:2;--num-blocks 6;--requests 1;--max-model-len 2;--prompt 2;--eagle all;"
        "--retention 0;--watermark 0.5;"
        "--without evict;--plant window-one-short;--limit-states 9;--seconds 2;--form batched;--chunk 7;--workers 1;"
        "--save {out}/found.jsonl;--json -;--html {out}/page.html",
        "--dialect rtp-llm/single;--prefix-tree;--independent-eviction;--linear-step 2;--reserve-ratio 5",
    ),
    *_rows(
        EXPLORE_RTP,
        "--groups full:2,mamba:2;--num-blocks 6;--requests 2;--max-model-len 1;--prompt 1;--linear-step 2;"
        "--reserve-ratio 50;--prefix-tree;--limit-states 9;--seconds 0.001;--save {out}/found.jsonl;"
        "--json {out}/out.json",
        "--dialect rtp-llm/single;--watermark 0.5;--independent-eviction;--eagle all;--retention 0;--without evict;"
        "--plant window-one-short;--form batched;--chunk 7;--workers 1",
    ),
    *_rows(
        "explore --dialect rtp-llm/hybrid-pool --linear-step 2 --requests 1 --max-model-len 2 --json - --prefix-tree "
        "--limit-states 200",
        "--independent-eviction",
    ),
    *_rows("check-connector examples/connector.py:only_group_0", "--engine lmcache;--json -", "--timeout 0"),
    *_rows(
        "check-events {in}/events.bin",
        "--batches 1;--record {out}/copy.bin;--json -",
        "--replay-endpoint tcp://127.0.0.1:1;--topic kv;--seconds 3;--endpoint tcp://127.0.0.1:1",
    ),
    *_rows(
        "check-events --endpoint tcp://127.0.0.1:1",
        "--endpoint tcp://127.0.0.1:2;--replay-endpoint tcp://127.0.0.1:3;--topic kv;--seconds 3",
    ),
    *(Row(MUTATE, *option, CHANGES) for option in (("--seed", ("1",)), ("--sample", ("2",)), ("--list", ()))),
    Row(MUTATE, "--json", ("-",), CHANGES),
    *(Row(MUTATE, option, (value,), REFUSED) for option, value in (("--by", "false"), ("--timeout", "0.001"))),
    Row(MUTATE, "--state", (".",), REFUSED),
    *_rows("vectors {out}/vectors", "--json -"),
]
