"""`python -m hkv.connectors`, and `hkv-layouts` of the wheel of that name: `hkv check-connector` without its packages.

`--vectors` writes the same cases as a file, for connectors in languages that neither Python nor C can call.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from collections.abc import Sequence

from hkv.connectors.cases import ENGINES, vector_cases
from hkv.connectors.check import check_connector
from hkv.errors import HKVError

HEADER = pathlib.Path(__file__).with_name("connector.h")
"""The structures of a function in C."""

EXAMPLE = "example: hkv-layouts my_connector.py:block_ranges --engine vllm"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status: 0 right, 1 wrong, 2 unusable input."""
    parser = argparse.ArgumentParser(
        "hkv-layouts", description="Hold a connector's ranges of bytes to the plan.", epilog=EXAMPLE
    )
    parser.add_argument(
        "connector", nargs="?", metavar="TARGET", help="FILE.py:FUNCTION, MODULE:FUNCTION or LIBRARY.so:FUNCTION"
    )
    parser.add_argument(
        "--engine", action="append", default=[], help=f"one of {', '.join(ENGINES)}; repeatable. [default: all]"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--vectors", metavar="FILE", help="write every case to FILE as JSON")
    parser.add_argument("--header", action="store_true", help="print the path of connector.h")
    given = parser.parse_args(arguments)
    try:
        if given.header:
            print(HEADER)
        if given.vectors:
            pathlib.Path(given.vectors).write_text(json.dumps({"cases": list(vector_cases())}), encoding="utf-8")
        if given.connector is None:
            return 0 if given.header or given.vectors else parser.error("a TARGET, --vectors or --header is needed")
        report = check_connector(given.connector, given.engine)
    except (HKVError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(report.record()) if given.json else report.describe())
    return int(bool(report.wrong))


if __name__ == "__main__":
    sys.exit(main())
