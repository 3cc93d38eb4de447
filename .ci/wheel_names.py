"""Asserts what a wheel installs, top-level names and data: `python wheel_names.py WHEEL`."""

import pathlib
import sys
import zipfile

EXPECTED = {"hkv", "pallas_kernels", "reference"}

OWN = ("mutants", "suites")
"""Folders of the tests alone."""

ROOT = pathlib.Path(__file__).resolve().parent.parent

paths = zipfile.ZipFile(sys.argv[1]).namelist()
names = {name.split("/")[0] for name in paths}
packages = {name for name in names if not name.endswith(".dist-info")}
if packages != EXPECTED:
    sys.exit(f"the wheel installs {sorted(packages)}, expected {sorted(EXPECTED)}")
if own := [path for path in paths if any(f"/{name}" in path for name in OWN)]:
    sys.exit(f"the wheel installs {own[0]}, which belongs to the tests")
released = [path for path in (ROOT / "hkv/model/released").rglob("*") if path.suffix in (".json", ".toml")]
shown = [path for path in (ROOT / "hkv/page").glob("*") if path.suffix in (".js", ".css", ".html")]
data = {path.relative_to(ROOT).as_posix() for path in (*released, *shown)}
if not data or (missing := sorted(data - set(paths))):
    sys.exit(f"the wheel lacks {missing[0] if data else 'hkv/model/released and hkv/page'}")
print(f"the wheel installs {', '.join(sorted(packages))}, with {len(data)} files of released models and pages")
