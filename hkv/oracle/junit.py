"""Verdicts on logs as JUnit XML, which CI services read: one test case a log."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Collection, Mapping


def junit_xml(engine: str, verdicts: Mapping[str, tuple[str, str]], failing: Collection[str]) -> bytes:
    """A test suite of one case a log.

    Args:
      engine: name of the engine that was held against the logs; names the suite.
      verdicts: by path, the verdict and what there is to say of it.
      failing: verdicts that count as failures; the others but `agrees` count as skipped.
    """
    failed = sum(verdict in failing for verdict, _ in verdicts.values())
    skipped = sum(verdict not in failing and verdict != "agrees" for verdict, _ in verdicts.values())
    counts = {"tests": str(len(verdicts)), "failures": str(failed), "skipped": str(skipped)}
    suite = ElementTree.Element("testsuite", {"name": f"hkv check --engine {engine}", **counts})
    for path, (verdict, said) in verdicts.items():
        case = ElementTree.SubElement(suite, "testcase", {"classname": "hkv.check", "name": path})
        if verdict in failing:
            ElementTree.SubElement(case, "failure", {"message": verdict}).text = said
        elif verdict != "agrees":
            ElementTree.SubElement(case, "skipped", {"message": f"{verdict}: {said}" if said else verdict})
    return ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True) + b"\n"
