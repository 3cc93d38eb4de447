"""The installed vLLM as an engine. Skipped where it is absent, except for the message that says so."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import pathlib
import subprocess
import sys

import pytest
from click.testing import CliRunner

from hkv.cli import cli
from hkv.contract import registry
from hkv.dialects.vllm.config import EARLIER
from hkv.dialects.vllm.engines import installed as installed_vllm
from hkv.dialects.vllm.engines.engine import Engine, KeyedEngine
from hkv.dialects.vllm.engines.numpy import NumpyEngine
from hkv.dialects.vllm.log import structs as oplog
from hkv.dialects.vllm.traffic.traffic import FEATURES, RandomChoices, draw_header
from hkv.errors import ConfigError, OperationError
from hkv.oracle.check import check_log
from hkv.oracle.engines import engine_factory
from hkv.oracle.log_file import find_logs, read_log
from hkv.oracle.record import Only, differ, record
from tests.oracle.test_live_logs import allocate

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
INSTALLED = importlib.util.find_spec("vllm") is not None

foreign_warnings = pytest.mark.filterwarnings("ignore")  # what vLLM and torch say when they are imported


@pytest.mark.skipif(INSTALLED, reason="vLLM is installed, so nothing says that it is absent")
def test_absence_is_said() -> None:
    header = draw_header(RandomChoices(0), "core")
    with pytest.raises(ConfigError, match=r"vLLM 0\.33 to be installed.*make_vllm_environment"):
        engine_factory("vllm")(header)


def test_absence_is_said_on_the_command_line(tmp_path: pathlib.Path) -> None:
    (tmp_path / "vllm.py").write_text("")
    script = (
        "import importlib.metadata as m, sys\n"
        "real = m.version\n"
        "def version(name):\n"
        "    if name == 'vllm': raise m.PackageNotFoundError(name)\n"
        "    return real(name)\n"
        "m.version = version\n"
        "import hkv.cli\n"
        f"sys.argv = ['hkv', 'record', '--feature', 'core', '--seed', '1', '-o', {str(tmp_path / 'a')!r}]\n"
        "hkv.cli.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("hkv: engine = 'vllm': expected vLLM 0.33 to be installed")
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "a").exists()


def test_another_release_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.34.0")
    with pytest.raises(ConfigError, match=r"vllm = '0\.34\.0': expected release 0\.33\..*vllm@0\.34\.0"):
        engine_factory("vllm")(draw_header(RandomChoices(0), "core"))


def test_a_version_that_is_named_has_to_be_the_installed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.34.0")
    with pytest.raises(ConfigError, match=r"engine = 'vllm@0\.35\.0': expected .*vllm@0\.34\.0"):
        engine_factory("vllm@0.35.0")(draw_header(RandomChoices(0), "core"))


@pytest.mark.vllm_earlier
@foreign_warnings
@pytest.mark.parametrize("feature", registry.dialect_of(EARLIER).features(EARLIER))
def test_the_earlier_release_decides_as_its_dialect_says(feature: str) -> None:
    vllm, only = engine_factory("vllm"), Only(dialect=EARLIER)
    for seed in (*range(10), 36, 43):
        recording, difference = differ(vllm, NumpyEngine, feature, seed, 4, 12, "exact", only)
        assert difference is None, difference
        assert recording.operations


class NextRelease(NumpyEngine):
    """A release whose rules are the old ones."""

    def __init__(self, header: oplog.Header, release: str | None = None) -> None:
        installed_vllm.require_vllm(release)
        super().__init__(header)


def test_a_version_that_is_named_goes_on_and_stands_in_every_report(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.34.0")
    monkeypatch.setattr(installed_vllm, "InstalledVllmEngine", NextRelease)
    log, name = str(tmp_path / "log.jsonl"), "vllm@0.34.0"
    for arguments, status in (
        (["record", "--engine", name, "--feature", "core", "--seed", "1", "--steps", "4", "-o", log], 0),
        (["check", "--engine", name, log], 0),
        (["diff", "--engines", f"numpy,{name}", "--seeds", "1", "--feature", "core", "--steps", "4"], 0),
        (["shrink", "--engine", name, log], None),
    ):
        done = CliRunner().invoke(cli, arguments)
        assert name in (done.output if status is not None else str(done.exception)), arguments
        assert status is None or done.exit_code == status


@pytest.mark.vllm
@foreign_warnings
def test_the_installed_version_can_be_named() -> None:
    name = f"vllm@{importlib.metadata.version('vllm')}"
    assert record(engine_factory(name), "core", 3, 2, 6) == record(engine_factory("vllm"), "core", 3, 2, 6)


@pytest.mark.vllm
@foreign_warnings
@pytest.mark.parametrize("feature", FEATURES)
def test_reference_and_vllm_agree(feature: str) -> None:
    for seed in range(1000, 1004):
        recording, parted = differ(engine_factory("numpy"), engine_factory("vllm"), feature, seed, 1 + seed % 2, 12)
        assert parted is None, (seed, parted, recording.operations[-1:])


@pytest.mark.vllm
@foreign_warnings
@pytest.mark.parametrize("feature", FEATURES)
def test_compiled_cache_and_vllm_agree(feature: str) -> None:
    recording, parted = differ(engine_factory("jax"), engine_factory("vllm"), feature, 1000, 2, 12)
    assert len(recording.operations) > 12
    assert parted is None, (parted, recording.operations[-1:])


@pytest.mark.vllm
@foreign_warnings
def test_recorded_logs_are_vllms() -> None:
    for path in find_logs([ROOT / "tests" / "data" / "oplogs"]):
        difference = check_log(read_log(path), engine_factory("vllm"))
        assert difference is None, difference.describe()


@pytest.mark.vllm
@foreign_warnings
def test_recording_is_repeatable() -> None:
    assert record(engine_factory("vllm"), "partial", 3, 2, 6) == record(engine_factory("vllm"), "partial", 3, 2, 6)


@pytest.mark.vllm
@foreign_warnings
def test_keyed_requests() -> None:
    engine = engine_factory("vllm")(draw_header(RandomChoices(4), "core"))
    assert isinstance(engine, Engine)
    assert isinstance(engine, KeyedEngine)
    engine.request_keyed("a", 3, [7, 8])
    engine.extend("a", 2)
    assert engine.lookup("a").hit == 0
    assert engine.num_free() > 0
    with pytest.raises(OperationError):
        engine.request_keyed("a", 3, [7])
    with pytest.raises(OperationError):
        engine.free("b")
    with pytest.raises(OperationError):
        engine.allocate(allocate("a", 1, 2))
