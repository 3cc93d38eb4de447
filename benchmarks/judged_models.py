"""Counts configs by their judge and by what it says of HKV's reading: `python benchmarks/judged_models.py`.

`--shrink` takes out of `tests/data/model_classes/expected.json` what is no longer true of HKV; it adds nothing.
"""

from __future__ import annotations

import argparse
import collections
import json
import sys
from typing import Any

from benchmarks.judges.recorded import EXPECTED, Outcome, found_today, judge, recorded_cases


def shrunk(known: dict[str, Any], today: dict[str, Any]) -> dict[str, Any]:
    """What is in both."""
    different = {
        name: kept
        for name, fields in known["different"].items()
        if (kept := [field for field in fields if field in today["different"].get(name, ())])
    }
    return {"different": different, "refused": [name for name in known["refused"] if name in today["refused"]]}


def counts() -> dict[str, collections.Counter[Outcome]]:
    """Configs of each source by what comes of them on one rank."""
    found: dict[str, collections.Counter[Outcome]] = collections.defaultdict(collections.Counter)
    for name, case in recorded_cases().items():
        found[name.partition("/")[0]][judge(case, 1).outcome] += 1
    return found


def share(outcomes: collections.Counter[Outcome]) -> float:
    """The part of what vLLM plans that HKV plans as well."""
    planned = outcomes[Outcome.EQUAL] + outcomes[Outcome.DIFFERENT]
    return planned / (planned + outcomes[Outcome.REFUSED_HERE])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shrink", action="store_true", help="shorten expected.json")
    parser.add_argument("--differences", action="store_true", help="print every difference and refusal")
    arguments = parser.parse_args()
    if arguments.shrink:
        known = json.loads(EXPECTED.read_text(encoding="utf-8"))
        EXPECTED.write_text(json.dumps(shrunk(known, found_today()), indent=1) + "\n", encoding="utf-8")
        return 0
    if arguments.differences:
        for name, case in recorded_cases().items():
            for ranks in case.answers:
                judgement = judge(case, ranks)
                for each in judgement.differences or ((judgement.message,) if judgement.message else ()):
                    print(f"{name} tp {ranks}: {judgement.outcome.value}: {each}")
        return 0
    for source, outcomes in counts().items():
        print(f"{source}: {outcomes.total()} configs, {share(outcomes):.1%} of what vLLM plans is planned")
        for outcome in Outcome:
            print(f"  {outcomes[outcome]:4} {outcome.value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
