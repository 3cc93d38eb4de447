"""Writes the tables of error classes and status codes into `docs/versions.md`, from the code.

Example:
  python docs/write_tables.py
"""

from __future__ import annotations

import ast
import pathlib

from hkv.oracle.log_file import write_atomically

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "versions.md"


def first_sentence(text: str) -> str:
    """Up to the first line that is empty, on one line."""
    return " ".join(text.strip().split("\n\n")[0].split())


def errors() -> str:
    """Every error class, its base and what it means."""
    rows = ["| error | is a | means |", "|---|---|---|"]
    for node in ast.parse((ROOT / "hkv" / "errors.py").read_text()).body:
        if isinstance(node, ast.ClassDef):
            base = ast.unparse(node.bases[0])
            rows.append(f"| `{node.name}` | `{base}` | {first_sentence(ast.get_docstring(node) or '')} |")
    return "\n".join(rows)


def statuses() -> str:
    """Every status code, its number and what it means."""
    rows = ["| code | status | means |", "|---|---|---|"]
    (table,) = (
        node
        for node in ast.parse((ROOT / "hkv" / "state" / "status.py").read_text()).body
        if isinstance(node, ast.ClassDef)
    )
    for node, after in zip(table.body, table.body[1:], strict=False):
        if isinstance(node, ast.Assign) and isinstance(after, ast.Expr):
            meaning = first_sentence(ast.literal_eval(after.value))
            rows.append(f"| {ast.unparse(node.value)} | `{ast.unparse(node.targets[0])}` | {meaning} |")
    return "\n".join(rows)


def written(page: str) -> str:
    """The page with its tables as the code has them."""
    for name, table in (("errors", errors()), ("statuses", statuses())):
        before, _, rest = page.partition(f"<!-- {name} -->\n")
        page = f"{before}<!-- {name} -->\n{table}\n<!-- end -->{rest.partition('<!-- end -->')[2]}"
    return page


if __name__ == "__main__":
    write_atomically(PAGE, written(PAGE.read_text()).encode())
