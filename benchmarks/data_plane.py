"""Speed at which pages move, next to this device's own copy: `python benchmarks/data_plane.py --json F --plot F.png`.

Runs anywhere: on a GPU over every implementation and a gigabyte, on a CPU over XLA alone and little enough to wait for;
`--seconds N` starts no case after N seconds, and names those that it leaves out.
For every operation, layout, dtype and page size it prints the bytes moved (read and written), GB/s, and the fraction of
the bandwidth of a plain copy of as many bytes, measured in the same run. For comparison, `jnp.take`, `.at[].set` and,
where PyTorch is installed for the device, `index_select` and `index_copy_` move the same pages, LMCache 0.5.6, where
installed, packs and unpacks the same objects, and vLLM's `reshape_and_cache_flash` on a GPU writes the same steps.

Pages are in random order and values random. What is written is poisoned first, and every result is verified before it
is timed. On a GPU sixteen operations are one program: the time is the device's, not that of starting a program. *run
bytes* is the shortest gapless piece that the operation plans to move. `--mib` is what one bulk operation moves out;
decode steps move 64, 256 and 4,096 tokens of all layers.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import data_plane_cases as cases
import jax
import numpy as np
from engine_kernels import imported, repeated, torch_for

from hkv.errors import ConfigError

MIB = 1 << 20


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_gpu = jax.default_backend() == "gpu"
    parser.add_argument("--mib", type=int, default=1024 if on_gpu else 8, help="MiB that one operation moves out")
    parser.add_argument("--repeats", type=int, default=15 if on_gpu else 5, help="timings of which the median counts")
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    parser.add_argument("--json", type=pathlib.Path, help="write every figure there")
    parser.add_argument("--plot", type=pathlib.Path, help="write a roofline plot there (PNG)")
    parser.add_argument("--seconds", type=float, default=math.inf, help="starts no case after so many seconds")
    options = parser.parse_args(arguments)
    if min(options.mib, options.repeats) < 1:
        parser.error("--mib and --repeats: expected at least 1")
    report = measure(options.mib * MIB, options.repeats, options.only, options.seconds)
    show(report)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    if options.plot:
        from data_plane_plot import draw

        draw(report, options.plot)
    return 1 if report["failures"] else 0


def measure(nbytes: int, repeats: int, only: str, limit: float) -> dict[str, Any]:
    """Everything as one JSON value."""
    started = time.monotonic()
    copy = [copy_bandwidth(nbytes, repeats)]
    rows: list[dict[str, Any]] = []
    failures: list[dict[str, str]] = []
    skipped: list[str] = []
    refusals: list[dict[str, str]] = []
    for case in cases.all_cases(nbytes):
        if only not in case.name:
            continue
        if time.monotonic() - started > limit:
            skipped.append(case.name)
            continue
        for implementation, make in case.candidates():
            progress(f"{case.name}: {implementation}")
            try:
                rows.append(one(case, implementation, make(), repeats))
            except ConfigError as refusal:  # runs that this kernel does not move
                refusals.append({"case": case.name, "implementation": implementation, "refusal": str(refusal)[:300]})
            except Exception as error:  # one implementation that fails must not cost the figures of the others
                failures.append(
                    {
                        "case": case.name,
                        "implementation": implementation,
                        "error": f"{type(error).__name__}: {error}"[:300],
                    }
                )
    copy.append(copy_bandwidth(nbytes, repeats))
    bandwidth = max(copy)
    for row in rows:
        row["fraction_of_copy"] = row["gb_per_s"] / bandwidth
    progress("")
    described = {**device(), "copy_gb_per_s": bandwidth, "copy_gb_per_s_before_and_after": copy}
    return {
        "device": described,
        "bytes_per_operation": nbytes,
        "repeats": repeats,
        "rows": rows,
        "refusals": refusals,
        "failures": failures,
        "skipped": skipped,
    }


def one(case: cases.Case, implementation: str, subject: cases.Measurable, repeats: int) -> dict[str, Any]:
    """Verifies, then times: the median of `repeats` timings, each of a few calls, after a warm-up."""
    subject.verify()
    seconds = timed(subject.run, subject.wait, repeats)
    return {
        "operation": case.operation,
        "layout": case.layout,
        "dtype": case.dtype,
        "page_bytes": case.page_bytes,
        "run_bytes": case.run_bytes,
        "implementation": implementation,
        "bytes_moved": case.bytes_moved,
        "seconds": seconds,
        "gb_per_s": case.bytes_moved / seconds / 1e9,
    }


def timed(run: Callable[[], Any], wait: Callable[[Any], None], repeats: int) -> float:
    """Median seconds of one operation, of runs that do `repeated()` each."""
    wait(run())
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        wait(run())
        found.append((time.perf_counter() - start) / repeated())
    return statistics.median(found)


def copy_bandwidth(nbytes: int, repeats: int) -> float:
    """GB/s, read and written, of an elementwise kernel over as many bytes, as XLA compiles it."""
    kept = [jax.random.bits(jax.random.key(seed), (nbytes // 4,), np.uint32) for seed in range(2)]
    flip = cases.in_one_dispatch(lambda to, shift, words: words ^ shift.astype(np.uint32))

    def flipped() -> Any:
        kept[0] = flip(kept[0], kept[1])
        return kept[0]

    return 2 * nbytes / timed(flipped, jax.block_until_ready, repeats) / 1e9


def device() -> dict[str, Any]:
    """Device that was measured, and versions of the packages."""
    found = jax.devices()[0]
    versions = {"python": platform.python_version(), "jax": jax.__version__, "numpy": np.__version__}
    torch = torch_for(found.platform)
    if torch is not None:
        versions["torch"] = torch.__version__
    for engine in ("lmcache", "vllm"):
        package = imported(engine)
        if package is not None:
            versions[engine] = package.__version__
    described = {"platform": found.platform, "kind": found.device_kind, "versions": versions}
    if found.platform == "gpu":
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        described["driver"] = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    else:
        described["note"] = "a CPU: these figures say nothing of a GPU"
    return described


def show(report: dict[str, Any]) -> None:
    found = report["device"]
    print(f"{found['platform']} ({found['kind']}), copy {found['copy_gb_per_s']:.1f} GB/s, {found['versions']}")
    if "note" in found:
        print(found["note"])
    header = (
        "operation",
        "layout",
        "dtype",
        "page bytes",
        "run bytes",
        "implementation",
        "MB moved",
        "GB/s",
        "of copy",
    )
    print(*(f"{title:>14}" for title in header))
    for row in report["rows"]:
        names = (row["operation"], row["layout"], row["dtype"], row["page_bytes"], row["run_bytes"])
        figures = (f"{row['bytes_moved'] / 1e6:.1f}", f"{row['gb_per_s']:.2f}", f"{row['fraction_of_copy']:.0%}")
        print(*(f"{entry!s:>14}" for entry in (*names, row["implementation"], *figures)))
    for refusal in report["refusals"]:
        print(f"refused {refusal['case']} by {refusal['implementation']}: {refusal['refusal']}")
    for name in report["skipped"]:
        print(f"skipped {name}: --seconds is over")
    for failure in report["failures"]:
        print(f"FAILED {failure['case']} by {failure['implementation']}: {failure['error']}")


def progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
