"""Asserts which top-level names a wheel installs: `python wheel_names.py WHEEL`."""

import sys
import zipfile

EXPECTED = {"hkv", "pallas_kernels", "reference"}

names = {name.split("/")[0] for name in zipfile.ZipFile(sys.argv[1]).namelist()}
packages = {name for name in names if not name.endswith(".dist-info")}
if packages != EXPECTED:
    sys.exit(f"the wheel installs {sorted(packages)}, expected {sorted(EXPECTED)}")
print(f"the wheel installs {', '.join(sorted(packages))}")
