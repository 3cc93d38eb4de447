"""A workload's hit rate on planned GPUs: `hkv plan NAME --gpu GPU --trace FILE`, or with `--prompt` and its like.

The cache that the plan finds is replayed as `hkv replay` does it: as it is, in twice the memory, and in a pool that
evicts nothing; with steps of half and of twice the time, which is the same as arrivals half and twice
as fast.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from hkv.cli.replay import parsed, points_of
from hkv.limits import counted, show_bytes
from hkv.replay import plot, sweep
from hkv.replay.swept import swept, without_evictions
from hkv.replay.traces.interned import InternedTrace
from hkv.replay.traces.reader import read_trace
from hkv.replay.traces.workloads import DEFAULTS, FORMATS, generate, trace_lines

STEP_MS = 50
"""Milliseconds that a step is taken to last."""

TOKENS_PER_ID = 16
"""Tokens that an id of a drawn trace names."""

REQUESTS = 1000
"""Requests of a drawn workload."""

SIZES = (0.25, 0.5, 1, 2, 4)
"""Shares of the planned memory that the plot shows."""


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A workload in a few numbers: single requests that share prefixes.

    Mean tokens of a prompt and of an answer, the percentage of a prompt that is one of some shared prefixes, and
    requests a second.
    """

    prompt: int
    answer: int
    shared: float
    rate: float

    def __str__(self) -> str:
        kind = DEFAULTS["shared-prefix"]
        return (
            f"{REQUESTS:,} requests, {self.rate:g} a second, prompts of {self.prompt:,} tokens, {self.shared:g} % of "
            f"them one of {kind.prefixes} prefixes, answers of {self.answer:,}"
        )


@dataclasses.dataclass(frozen=True)
class Served:
    """A planned engine, as far as a replay needs it.

    Attributes:
      config: the model's name.
      memory: bytes for the cache on each GPU.
      tp: tensor-parallel ranks.
      gpus: GPUs of the engine.
      kv_dtype: element type of its cache.
      max_model_len: of the longest request.
      step_tokens: most tokens of a step.
      max_running: most requests of a step.
      retains: the model has windows or states, of which denser retention keeps more.
    """

    config: str
    memory: int
    tp: int
    gpus: int
    kv_dtype: str
    max_model_len: int
    step_tokens: int
    max_running: int
    retains: bool

    def words(self, trace: str, sizes: Sequence[int], **more: str) -> list[str]:
        """The command line of a sweep over sizes of the memory."""
        options = {
            "model": self.config,
            "memory": ",".join(map(str, sizes)),
            "tp": str(self.tp),
            "kv-dtype": self.kv_dtype,
            "max-model-len": str(self.max_model_len),
            "step-tokens": str(self.step_tokens),
            "max-running": str(self.max_running),
            "step-ms": str(STEP_MS),
            **more,
        }
        return [trace, *(word for name, value in options.items() for word in (f"--{name}", value))]


@contextlib.contextmanager
def trace_of(workload: Drawn | str) -> Iterator[str]:
    """The path of a trace: the one that was given, or one that is drawn."""
    if isinstance(workload, str):
        yield workload
        return
    shared = round(workload.prompt * workload.shared / 100)
    settings = dataclasses.replace(
        DEFAULTS["shared-prefix"],
        requests=REQUESTS,
        rate=workload.rate,
        prefix_tokens=shared,
        prompt_tokens=max(1, workload.prompt - shared),
        output_tokens=workload.answer,
    )
    lines = trace_lines(generate("shared-prefix", settings, 0), FORMATS[0], TOKENS_PER_ID)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "workload.jsonl")
        path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
        yield str(path)


def answered(
    served: Served,
    workload: Drawn | str,
    target: float | None,
    more_gpus: Callable[[int, str], Served | None],
    plot_path: str | None,
) -> tuple[dict[str, Any], bytes]:
    """Hit rates of a workload, and the cheapest change that reaches a target percentage, as plain values, and the plot.

    `more_gpus` plans the same engine with so many ranks and an element type of the cache; None where it is refused. The
    plot is empty without a path that it is for.
    """
    with trace_of(workload) as path:
        drawn = isinstance(workload, Drawn)
        trace = InternedTrace(read_trace(path, TOKENS_PER_ID if drawn else None, None))
        sizes = [round(share * served.memory) for share in (SIZES if plot_path else (1, 2))]
        points = points_of(parsed(served.words(path, sizes)))
        jobs = os.cpu_count() or 1
        rows, _ = swept(points, trace, jobs=jobs)
        infinite = without_evictions(points, rows, lambda left: swept(left, trace, jobs=jobs)[0])
        by_size = {sweep.size_of(row["options"]): row for row in rows}
        now, twice = by_size[served.memory], by_size[2 * served.memory]
        steps = {"half": STEP_MS // 2, "twice": 2 * STEP_MS}
        moved = {name: _rate(served, path, trace, jobs, value) for name, value in steps.items()}
        bound = max((row["hit_rate"] for row in infinite.values()), default=now["hit_rate"])
        reached = None if target is None else _reaching(served, path, trace, jobs, target / 100, now, more_gpus)
        title = f"{served.config}: {workload if drawn else pathlib.Path(path).name}"
        picture = plot.drawn_sweep(rows, plot_path, title, infinite) if plot_path else b""
    report = {
        "workload": dataclasses.asdict(workload) | {"requests": REQUESTS} if drawn else {"trace": workload},
        "memory": served.memory,
        "now": now["hit_rate"],
        "twice_the_memory": twice["hit_rate"],
        "without_evictions": bound,
        "refused": sweep.refused(now),
        "preemptions": now["preemptions"],
        "step_ms": STEP_MS,
        "moved": moved,
        "target": None if target is None else {"hit_rate": target / 100, "reached": reached},
    }
    return report, picture


def _rate(served: Served, path: str, trace: InternedTrace, jobs: int, step_ms: int) -> float:
    """The hit rate with steps of another length."""
    return _row(served.words(path, [served.memory], **{"step-ms": str(step_ms)}), trace, jobs)["hit_rate"]


def _row(words: list[str], trace: InternedTrace, jobs: int) -> Mapping[str, Any]:
    """Result of the one replay that a command line names."""
    [row], _ = swept(points_of(parsed(words)), trace, jobs=jobs)
    return row


def _reaching(
    served: Served,
    path: str,
    trace: InternedTrace,
    jobs: int,
    target: float,
    now: Mapping[str, Any],
    more_gpus: Callable[[int, str], Served | None],
) -> dict[str, Any] | None:
    """The cheapest of some changes that reaches the target: none, denser retention, smaller elements, more GPUs."""
    if now["hit_rate"] >= target:
        return {"change": "", "gpus": served.gpus, "tp": served.tp, "kv_dtype": served.kv_dtype, **_hit(now)}
    for tp in [served.tp << power for power in range(4) if served.tp << power <= 8]:
        for kv_dtype in dict.fromkeys((served.kv_dtype, "fp8")):
            other = more_gpus(tp, kv_dtype)
            if other is None:
                continue
            for retention in ("0", "dense") if served.retains else ("0",):
                if (tp, kv_dtype, retention) == (served.tp, served.kv_dtype, "0"):
                    continue  # as it is now, which does not reach it
                row = _row(other.words(path, [other.memory], retention=retention), trace, jobs)
                if row["hit_rate"] >= target:
                    changes = [
                        f"--tensor-parallel-size {tp}" if tp > served.tp else "",
                        f"--kv-cache-dtype {kv_dtype}" if kv_dtype != served.kv_dtype else "",
                        "--prefix-cache-retention-interval None" if retention == "dense" else "",
                    ]
                    change = " ".join(filter(None, changes))
                    return {"change": change, "gpus": other.gpus, "tp": tp, "kv_dtype": kv_dtype, **_hit(row)}
    return None


def _hit(row: Mapping[str, Any]) -> dict[str, Any]:
    return {"hit_rate": row["hit_rate"], "memory": int(sweep.size_of(row["options"]))}


def workload_lines(report: Mapping[str, Any], served: Served, workload: Drawn | str, serve: str) -> Iterator[str]:
    """The answer for people, in one screen of 80 columns."""
    lines = [
        f"{served.config} on {counted(served.gpus, 'GPU')}, {show_bytes(served.memory)} for the cache on each",
        f"workload: {workload}",
        "",
        f"{'hit rate now':<30}{report['now']:7.2%}",
        f"{'with twice the memory':<30}{report['twice_the_memory']:7.2%}",
        f"{'in a pool that evicts nothing':<30}{report['without_evictions']:7.2%}",
    ]
    if report["refused"]:
        limit = f"{served.max_model_len:,} tokens, or than the pool"
        lines.append(f"{counted(report['refused'], 'request')} refused: longer than {limit}")
    if report["target"] is not None:
        lines += ["", *_target_lines(report["target"])]
    moved, drawn = report["moved"], "as recorded" if isinstance(workload, str) else "at random times"
    lines += [
        *([serve] if serve else ()),
        "",
        f"assumed: a step lasts {report['step_ms']} ms, and requests arrive {drawn}. In steps of half that time, "
        f"or with half as many arrivals, {moved['half']:.2%}; of twice, or with twice as many, {moved['twice']:.2%}.",
    ]
    for line in lines:
        yield from textwrap.wrap(line, 80, subsequent_indent="  ", break_on_hyphens=False) or [""]


def _target_lines(target: Mapping[str, Any]) -> Iterator[str]:
    reached, rate = target["reached"], target["hit_rate"]
    if reached is None:
        yield f"{rate:.0%}: not reached with up to 8 GPUs an engine, fp8 and dense retention"
    else:
        how = f"with {reached['change']}" if reached["change"] else "as it is"
        yield f"{rate:.0%}: reached {how}, on {counted(reached['gpus'], 'GPU')} ({reached['hit_rate']:.2%})"
