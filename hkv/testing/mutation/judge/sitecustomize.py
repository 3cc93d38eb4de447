"""Import hook of `hkv mutate`: Python runs this at the start of every process whose `PYTHONPATH` leads here.

It imports nothing of HKV, as the judge may be of another environment. The folder that `HKV_EDITED_SOURCE` names has
`module` (path of the file to replace), `source` (text to run in its place), `limit` (seconds of processor time), and
takes `seen` once the text was run. Where it has a file `reached`, the lines of the statements that run are added to it.
"""

import contextlib
import os
import sys

VARIABLE = "HKV_EDITED_SOURCE"
MARK = "__hkv_reached__"
BLOCKS = ("body", "orelse", "finalbody")


def _install(folder):
    from importlib.machinery import SourceFileLoader

    with open(os.path.join(folder, "module"), encoding="utf-8") as file:
        edited = file.read()
    name, usual = os.path.basename(edited), SourceFileLoader.get_code

    def get_code(self, fullname):
        if os.path.basename(self.path) != name or os.path.realpath(self.path) != edited:
            return usual(self, fullname)
        return _code(folder, self.path)

    SourceFileLoader.get_code = get_code
    _limit(folder)


def _code(folder, path):
    """The text compiled in the module's place; tracebacks and `inspect` are shown it too."""
    import linecache

    with open(os.path.join(folder, "source"), encoding="utf-8", newline="") as file:
        source = file.read()
    linecache.cache[path] = (len(source), None, source.splitlines(True), path)
    with open(os.path.join(folder, "seen"), "a", encoding="utf-8"):
        pass
    if not os.path.exists(os.path.join(folder, "reached")):
        return compile(source, path, "exec", dont_inherit=True)
    return compile(_marked(source, os.path.join(folder, "reached")), path, "exec", dont_inherit=True)


def _marked(source, reached):
    """The syntax tree with a call before each statement that tells its line, once in a process."""
    import ast
    import builtins

    lines = set()

    def mark(line):
        if line not in lines:
            lines.add(line)
            with open(reached, "a", encoding="ascii") as file:
                file.write(f"{line}\n")

    setattr(builtins, MARK, mark)
    tree = ast.parse(source)
    blocks = []
    for node in ast.walk(tree):
        blocks += [block for name in BLOCKS if isinstance(block := getattr(node, name, None), list)]
    for block in blocks:
        marked = []
        for statement in block:
            # Docstrings, and imports from __future__, have to be the first.
            text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
            if not text and not isinstance(statement, ast.ImportFrom):
                call = ast.Call(ast.Name(MARK, ast.Load()), [ast.Constant(statement.lineno)], [])
                before = ast.copy_location(ast.Expr(call), statement)
                marked.append(ast.fix_missing_locations(before))
            marked.append(statement)
        block[:] = marked
    return tree


def _limit(folder):
    """Ends a process that computes for too long, and offers it first where memory runs out."""
    with open(os.path.join(folder, "limit"), encoding="ascii") as file:
        seconds = int(file.read())
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(
            resource.RLIMIT_CPU, (seconds, seconds + 2)
        )  # at the hard limit it would look like any other process that is killed
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")


def _next():
    """Runs the `sitecustomize` that this one hides."""
    here = os.path.dirname(os.path.abspath(__file__))
    kept, this = list(sys.path), sys.modules.pop("sitecustomize", None)
    sys.path[:] = [path for path in kept if os.path.abspath(path) != here]
    try:
        import sitecustomize  # noqa: F401
    except ImportError:
        if this is not None:
            sys.modules["sitecustomize"] = this


if VARIABLE in os.environ:
    _install(os.environ[VARIABLE])
_next()
