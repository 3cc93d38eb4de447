"""A real `LLM()` whose engine core is forked, spawned and killed: its log is on disk up to two seconds before."""

from __future__ import annotations

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
import urllib.request
from typing import Any

import pytest

from hkv.contract import registry
from hkv.dialects.vllm.log.structs import RequestOp
from hkv.oracle.check import check_log
from hkv.oracle.engines import engine_factory
from hkv.oracle.log_file import find_logs, read_log
from hkv.oracle.side import FREE
from tests.attach.test_processes import told
from tests.page.reading import cells_of, data_in

pytestmark = pytest.mark.vllm

ROOT = pathlib.Path(__file__).parents[2]

PROGRAM = """
import itertools, multiprocessing, os, pathlib, random, sys
import vllm.v1.engine.utils
from vllm import LLM, SamplingParams

def main(folder, start):
    if start == "fork":  # on a CPU vLLM asks for spawn itself
        vllm.v1.engine.utils.get_mp_context = lambda: multiprocessing.get_context(start)
    llm = LLM(
        model=folder, skip_tokenizer_init=True, load_format="dummy", enforce_eager=True, num_gpu_blocks_override=40,
        distributed_executor_backend="tests.attach.no_model.NoModel",
        max_model_len=256, max_num_batched_tokens=128, max_num_seqs=8, dtype="float16",
    )
    draw, texts, place = random.Random(0), [[]], pathlib.Path(folder, "told")
    for round in itertools.count(1):
        for _ in range(8):
            begun = draw.choice(texts)[: draw.randrange(150)]
            texts.append(begun + [draw.randrange(500) for _ in range(draw.randrange(1, 60))])
        prompts = [{"prompt_token_ids": text} for text in texts[-8:]]
        llm.generate(prompts, SamplingParams(max_tokens=8, ignore_eos=True, detokenize=False), use_tqdm=False)
        place.with_suffix(".new").write_text(f"{os.getpid()} {8 * round}")
        os.replace(place.with_suffix(".new"), place)

if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
"""


def begin(folder: pathlib.Path, start: str, **settings: str) -> subprocess.Popen[bytes]:
    """An `LLM()` with HKV's plugin, as installed, in rounds of eight requests."""
    from benchmarks.attach_schedulers import MODEL

    (folder / "config.json").write_text(json.dumps(MODEL))
    (folder / "program.py").write_text(PROGRAM)
    plugin = folder / "packages" / "plugin-1.dist-info"
    plugin.mkdir(parents=True)
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1\n")
    (plugin / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nhkv_of_the_checkout = hkv.dialects.vllm.attach.plugin:register\n"
    )
    environment = os.environ | {
        "PYTHONPATH": f"{plugin.parent}{os.pathsep}{ROOT}",
        "HKV_ATTACH": json.dumps({"folder": str(folder / "logs"), **settings}),
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
        "VLLM_WORKER_MULTIPROCESSING_METHOD": start,
    }
    command = [sys.executable, str(folder / "program.py"), str(folder), start]
    with (folder / "said").open("wb") as said:
        return subprocess.Popen(command, env=environment, stdout=said, stderr=said, start_new_session=True)


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_the_page_of_an_engine_core_follows_it(start: str, tmp_path: pathlib.Path) -> None:
    process = begin(tmp_path, start, mode="shadow", serve="127.0.0.1:0", states="step")
    seen, both = list[int](), list[int]()
    case: Any = {}
    live = beside = case
    try:
        told(tmp_path, 200)
        (url,) = re.findall(
            r"^.*live page: (http://127\.0\.0\.1:\d+/\S+/)$", (tmp_path / "said").read_text(), re.MULTILINE
        )
        deadline = time.monotonic() + 120
        # Both sides are looked at now and then, after the same operation only by chance.
        while len(seen) < 3 or not both:
            assert time.monotonic() < deadline
            with urllib.request.urlopen(f"{url}data?since=0", timeout=60) as answer:
                (case,) = data_in(answer.read())["cases"]
            seen.append(case["first"] + len(case["operations"].splitlines()))
            live, beside = case["sides"]
            both = sorted(at for at in set(live["looks"].tolist()) & set(beside["looks"].tolist()) if at >= 0)
            time.sleep(2)
        assert process.poll() is None
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert seen[0] < seen[1] < seen[2]
    assert "none differs" in case["headline"]
    assert (live["told"], beside["told"]) == (True, False)
    for at in both:  # a block that was held between two looks may be plainly free on one side and untold on the other
        told_cells, cells = (
            {block: cell for block, cell in cells_of(side, at).items() if cell[0] != FREE} for side in (live, beside)
        )
        assert told_cells == cells, at


def wait_for(core: int) -> None:
    """Waits until an engine core has ended, of which its parent takes no notice."""
    deadline = time.monotonic() + 60
    while pathlib.Path(f"/proc/{core}/cmdline").exists() and pathlib.Path(f"/proc/{core}/cmdline").read_bytes():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("start", "ending"), [("fork", signal.SIGKILL), ("spawn", signal.SIGKILL), ("fork", signal.SIGTERM)]
)
def test_the_log_of_an_engine_core_is_on_disk(start: str, ending: int, tmp_path: pathlib.Path) -> None:
    process = begin(tmp_path, start)
    try:
        told(tmp_path, 200)
        time.sleep(3)
        _, served = told(tmp_path)
        time.sleep(2)
        (path,) = find_logs([tmp_path / "logs"])
        core = int(pathlib.Path(path).name.split("-")[0])
        os.kill(core, ending)
        wait_for(core)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    said = f"hkv: vLLM's cache managers are recorded to {tmp_path / 'logs'} (process {core})"
    assert said in (tmp_path / "said").read_text()
    (log,) = (read_log(path) for path in find_logs([tmp_path / "logs"]))
    assert sum(isinstance(each, RequestOp) for each in log.operations) >= served
    assert len(log.header.groups) == 2
    assert registry.dialect_of(log.header.dialect).ended(log) == ""
    assert check_log(log, engine_factory("numpy")) is None
