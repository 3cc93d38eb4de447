"""Asserts which top-level names a wheel installs: `python wheel_names.py WHEEL`."""

import sys
import zipfile

EXPECTED = {"hkv", "pallas_kernels", "reference"}

OWN = ("mutants", "suites")
"""Folders of the tests alone."""

paths = zipfile.ZipFile(sys.argv[1]).namelist()
names = {name.split("/")[0] for name in paths}
packages = {name for name in names if not name.endswith(".dist-info")}
if packages != EXPECTED:
    sys.exit(f"the wheel installs {sorted(packages)}, expected {sorted(EXPECTED)}")
if own := [path for path in paths if any(f"/{name}" in path for name in OWN)]:
    sys.exit(f"the wheel installs {own[0]}, which belongs to the tests")
print(f"the wheel installs {', '.join(sorted(packages))}")
