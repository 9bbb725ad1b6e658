"""Whether the tests notice small mistakes in the mathematics: a mutation check.

    python tools/mutants.py [--count 150] [--seed 0] [--jobs 2] [--minutes 120] [--out mutants.json]

Chosen places of ``ops``, ``nn``, ``attribution`` and ``metrics`` are changed, one at a time: a
comparison, a sign, a constant, a dropped call. For every such mutant, the tests that run through
the changed line are run in a copy of the repository, shortest first, until one fails ("killed").
Which tests those are is measured once, on the unchanged code. What no test notices is listed.

Left out are files whose code runs on a GPU only, annotations, docstrings, texts of errors, and
calls that change no value (``contiguous``). The same seed chooses the same mutants of the same
code, in the same order. A run that was stopped continues with ``--again`` and the file that it
wrote, and so do survivors after a test was written for them: what was killed is not run again.
``--map FILE`` keeps the measurement for that.

A mutant is killed if a test fails. Tests that end for want of time are listed as such and not
counted as killed: the limit is one of processor time, which goes on neither while the machine is
busy nor while the process is stopped, and a generous one of the clock is for those that wait.
"""

import argparse
import ast
import contextlib
import copy
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("ops", "nn", "attribution", "metrics")
# Code that runs on a GPU only; tests/ops/test_kernels.py is run there.
GPU_ONLY = {"bcos_triton.py", "attention_triton.py", "attention_kernels.py", "cuda_graphs.py"}
TESTS = [f"tests/{name}" for name in ("ops", "nn", "attribution", "metrics", "models", "export")]
TESTS += ["tests/report/test_evaluate.py", "tests/auditing", "tests/test_properties.py"]
# Seconds of tests per mutant, by their measured durations; the shortest are taken first.
SECONDS = 40.0
# Seconds by the clock beyond those of the processor, for tests that wait for ever.
WAITING = 900.0
MEMORY = 16 << 30

COMPARISONS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
ARITHMETIC = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}
# Methods (or functions of torch) that are taken away, and those that are exchanged.
TAKEN = {"abs", "clamp", "clamp_min", "clamp_", "relu", "detach", "sqrt", "square", "exp", "log"}
TAKEN |= {"softmax", "normalize", "flip", "float", "double", "pow"}
EXCHANGED = {"sum": "mean", "mean": "sum", "amax": "amin", "amin": "amax", "max": "min"}
EXCHANGED |= {"min": "max", "zeros": "ones", "ones": "zeros", "any": "all", "all": "any"}
EXCHANGED |= {"zeros_like": "ones_like", "ones_like": "zeros_like", "maximum": "minimum"}
EXCHANGED |= {"minimum": "maximum", "argmax": "argmin", "floor": "ceil", "ceil": "floor"}
# Calls whose first two arguments may be exchanged without a change of meaning.
SYMMETRIC = {"max", "min", "maximum", "minimum", "equal", "isinstance", "assert_close", "transpose"}
# Where nothing is mutated: what is never computed with.
SKIPPED = (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom)


@dataclass(frozen=True)
class Mutant:
    """One change of the source.

    Args:
        file: The path below the root.
        line: The first line that is changed.
        statement: First and last line of the statement that contains it.
        scope: First and last line of the function around it, or of the file.
        operator: What kind of change it is.
        before, after: The changed part of the source, and what takes its place.
        span: Line and column (in bytes) of its start and end.
    """

    file: str
    line: int
    statement: tuple[int, int]
    scope: tuple[int, int]
    operator: str
    before: str
    after: str
    span: tuple[int, int, int, int]

    def applied(self, text: str) -> str:
        first, start, last, end = self.span
        lines = text.encode().splitlines(keepends=True)
        head = b"".join(lines[: first - 1]) + lines[first - 1][:start]
        tail = lines[last - 1][end:] + b"".join(lines[last:])
        return (head + self.after.encode() + tail).decode()


def changes(node: ast.AST) -> Iterator[tuple[str, ast.AST | str]]:
    """Yields the changes of one node: their kind and what takes its place."""
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in COMPARISONS:
            new = copy.copy(node)
            new.ops = [COMPARISONS[type(operator)]()]
            yield "comparison", new
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in ARITHMETIC:
            texts = isinstance(left, ast.JoinedStr) or isinstance(right, ast.JoinedStr)
            union = any(isinstance(x, ast.Constant) and x.value is None for x in (left, right))
            if not (texts or union):
                yield "arithmetic", ast.BinOp(left, ARITHMETIC[type(operator)](), right)
        case ast.UnaryOp(op=ast.USub() | ast.Not(), operand=operand):
            yield "sign" if isinstance(node.op, ast.USub) else "not", operand
        case ast.BoolOp(op=operator, values=values):
            yield (
                "boolean",
                ast.BoolOp(ast.And() if isinstance(operator, ast.Or) else ast.Or(), values),
            )
        case ast.Constant(value=bool(value)):
            yield "constant", ast.Constant(not value)
        case ast.Constant(value=int(value)):
            yield "constant", ast.Constant(value + 1)
        case ast.Constant(value=float(value)):
            yield "constant", ast.Constant(2 * value if value else 1.0)
        case ast.If(test=test) | ast.IfExp(test=test):
            yield "condition", test
        case ast.Return(value=ast.AST() as value) if not isinstance(value, ast.Constant):
            yield "return", "return None"
        case ast.Expr(value=ast.Call()):
            yield "call", "pass"
        case ast.AugAssign(op=operator) if type(operator) in ARITHMETIC:
            new = copy.copy(node)
            new.op = ARITHMETIC[type(operator)]()
            yield "arithmetic", ast.unparse(new)
        case ast.Call(func=function, args=arguments):
            name = function.attr if isinstance(function, ast.Attribute) else None
            name = function.id if isinstance(function, ast.Name) else name
            module = isinstance(function, ast.Attribute) and (
                isinstance(function.value, ast.Name) and function.value.id in ("torch", "F", "np")
            )
            if name in TAKEN:
                inner = function.value if isinstance(function, ast.Attribute) else None
                if module or inner is None:
                    inner = arguments[0] if arguments else None
                if inner is not None:
                    yield "taken away", inner
            if name in EXCHANGED:
                new = copy.copy(node)
                new.func = copy.copy(function)
                field = "attr" if isinstance(function, ast.Attribute) else "id"
                setattr(new.func, field, EXCHANGED[name])
                yield "exchanged", new
            plain = [not isinstance(argument, ast.Starred) for argument in arguments[:2]]
            if len(plain) == 2 and all(plain) and name not in SYMMETRIC:
                new = copy.copy(node)
                new.args = [arguments[1], arguments[0], *arguments[2:]]
                if ast.dump(arguments[0]) != ast.dump(arguments[1]):
                    yield "arguments", new


def is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def children(node: ast.AST) -> Iterator[ast.AST]:
    """Yields the children that are computed with: no annotations, no decorators, no texts."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "bases", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, SKIPPED):
                yield child


def mutants_of(path: Path, root: Path = ROOT) -> list[Mutant]:
    """Lists every mutant of a file."""
    text = path.read_text()
    lines = text.encode().splitlines(keepends=True)
    found: list[Mutant] = []

    def segment(node: ast.AST) -> str:
        rows = lines[node.lineno - 1 : node.end_lineno]
        rows[-1] = rows[-1][: node.end_col_offset]
        rows[0] = rows[0][node.col_offset :]
        return b"".join(rows).decode()

    def add(node: ast.AST, kind: str, new: ast.AST | str, where: tuple) -> None:
        statement, scope = where
        target = node.test if kind == "condition" else node
        after = f"(not ({ast.unparse(new)}))" if kind == "condition" else new
        if isinstance(after, ast.AST):
            after = f"({ast.unparse(after)})"
        span = (target.lineno, target.col_offset, target.end_lineno, target.end_col_offset)
        name = str(path.relative_to(root))
        before = segment(target)
        found.append(Mutant(name, target.lineno, statement, scope, kind, before, after, span))

    def visit(node: ast.AST, statement: tuple[int, int], scope: tuple[int, int]) -> None:
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            last = body[0].lineno - 1 if isinstance(body, list) else node.end_lineno
            statement = (node.lineno, max(node.lineno, last))
        if isinstance(node, ast.FunctionDef):
            if node.name in ("__repr__", "extra_repr"):
                return
            scope = (node.lineno, node.end_lineno)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if is_docstring(node):
            return
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return
        for kind, new in changes(node):
            add(node, kind, new, (statement, scope))
        for child in children(node):
            visit(child, statement, scope)

    visit(ast.parse(text), (1, 1), (1, len(lines)))
    valid = []
    for mutant in found:
        try:
            compile(mutant.applied(text), mutant.file, "exec")
        except SyntaxError:
            continue
        valid.append(mutant)
    return valid


def choose(count: int, seed: int, root: Path = ROOT) -> list[Mutant]:
    """Chooses mutants at random, at most one per line."""
    paths = [p for name in PACKAGES for p in sorted((root / "src/bcosvit" / name).glob("*.py"))]
    paths = [path for path in paths if path.name not in GPU_ONLY]
    every = [mutant for path in paths for mutant in mutants_of(path, root)]
    random.Random(seed).shuffle(every)
    lines: set[tuple[str, int]] = set()
    chosen = []
    for mutant in every:
        if (mutant.file, mutant.line) not in lines and len(chosen) < count:
            lines.add((mutant.file, mutant.line))
            chosen.append(mutant)
    return chosen


# --- Which tests run through which line. This file is a plugin of pytest during that run.


def processor_seconds() -> float:
    """What this process and its children have computed; waiting is left out."""
    return sum(os.times()[:4])


def pytest_runtest_protocol(item, nextitem) -> None:  # type: ignore[no-untyped-def]
    item.begun = processor_seconds()


def pytest_runtest_teardown(item, nextitem) -> None:  # type: ignore[no-untyped-def]
    item.user_properties.append(("seconds", processor_seconds() - item.begun))


def pytest_runtest_logreport(report) -> None:  # type: ignore[no-untyped-def]
    target = os.environ.get("MUTANTS_DURATIONS")
    if target and not os.environ.get("PYTEST_XDIST_WORKER"):
        spent = dict(report.user_properties).get("seconds", 0.0)
        with open(target, "a") as file:
            file.write(json.dumps([report.nodeid, report.outcome, spent]) + "\n")


def copied(folder: Path) -> Path:
    """A copy of what the tests need; weights are linked."""
    for name in ("tests", "examples", "benchmarks"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "hubconf.py"):
        shutil.copy(ROOT / name, folder)
    ignored = shutil.ignore_patterns("__pycache__", "pretrained")
    shutil.copytree(ROOT / "src/bcosvit", folder / "src/bcosvit", ignore=ignored)
    (folder / "src/bcosvit/pretrained").symlink_to(ROOT / "src/bcosvit/pretrained")
    return folder


def environment(folder: Path, **others: str) -> dict[str, str]:
    paths = [str(folder / "src"), str(ROOT / "tools"), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        # A stale file of bytecode with the same second and size would hide a mutant.
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        **others,
    }


def limited(seconds: float) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 1, int(seconds) + 10))


def end(process: int) -> None:
    """Ends a process and all that it started, which stay in our group to be stopped with us."""
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{process}/task/{process}/children").read_text().split():
            end(int(child))
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


def measure_tests(folder: Path, jobs: int, tests: list[str]) -> dict[str, object]:
    """Runs the tests on the unchanged code.

    Returns:
        ``durations`` of the tests that passed, and ``lines``: for each file, the tests that ran
        each line.
    """
    import coverage

    durations_file = folder / "durations.jsonl"
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "-p", "mutants"]
    command += ["-p", "no:cacheprovider", "--cov=src/bcosvit", "--cov-context=test"]
    command += [
        "--cov-report=",
        "--continue-on-collection-errors",
        *(["-n", str(jobs)] if jobs > 1 else []),
        *tests,
    ]
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment(folder, MUTANTS_DURATIONS=str(durations_file)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    print("\n".join(done.stdout.splitlines()[-25:]), flush=True)
    durations: dict[str, float] = defaultdict(float)
    wrong = set()
    for row in durations_file.read_text().splitlines():
        name, outcome, seconds = json.loads(row)
        durations[name] += seconds
        if outcome != "passed":
            wrong.add(name)
    passed = {name: seconds for name, seconds in durations.items() if name not in wrong}
    data = coverage.CoverageData(str(folder / ".coverage"))
    data.read()
    lines: dict[str, dict[str, list[str]]] = {}
    for file in data.measured_files():
        rows = {}
        for line, contexts in data.contexts_by_lineno(file).items():
            tests = {c.rsplit("|", 1)[0] for c in contexts if c} & passed.keys()
            if tests:
                rows[str(line)] = sorted(tests)
        lines[str(Path(file).relative_to(folder))] = rows
    return {"durations": passed, "failed": sorted(wrong), "lines": lines}


def tests_for(mutant: Mutant, known: dict) -> list[str]:
    """The tests that run through a mutant, the package's own first, shortest first."""
    lines = known["lines"].get(mutant.file, {})

    def between(first: int, last: int) -> set[str]:
        return {t for line in range(first, last + 1) for t in lines.get(str(line), ())}

    # What is run while the module is imported (defaults, constants) belongs to no test.
    found = between(*mutant.statement) or between(*mutant.scope)
    package = mutant.file.split("/")[2]
    durations = known["durations"]
    ordered = sorted(found, key=lambda t: (not t.startswith(f"tests/{package}/"), durations[t], t))
    chosen, spent = [], 0.0
    for test in ordered:
        if not chosen or spent + durations[test] <= SECONDS:
            chosen.append(test)
            spent += durations[test]
    return sorted(chosen, key=lambda t: (durations[t], t))


def judge(mutant: Mutant, tests: list[str], known: dict, folder: Path, until: float) -> dict:
    """Runs the tests of one mutant."""
    path = folder / mutant.file
    text = path.read_text()
    start = time.monotonic()
    if not tests:
        return {**asdict(mutant), "result": "survived", "why": "no test runs this line"}
    limit = 60 + 4 * sum(known["durations"][test] for test in tests)
    arguments = folder / "arguments.txt"
    arguments.write_text("\n".join(tests))
    path.write_text(mutant.applied(text))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--tb=line", "--no-header"]
    command += ["-p", "no:cacheprovider", f"@{arguments}"]
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: limited(limit),
    )
    output, clock = "", limit + WAITING
    try:
        output, _ = process.communicate(timeout=max(1.0, min(clock, until - time.monotonic())))
        result, why = verdict(process.returncode, output)
    except subprocess.TimeoutExpired:
        out_of_time = time.monotonic() < until
        result, why = ("timeout", "it waits") if out_of_time else ("not run", "out of time")
    finally:
        if process.poll() is None:
            end(process.pid)
            process.communicate()
        path.write_text(text)
    seconds = round(time.monotonic() - start, 1)
    return {**asdict(mutant), "result": result, "why": why, "tests": len(tests), "seconds": seconds}


def verdict(code: int, output: str) -> tuple[str, str]:
    """What the end of pytest says about a mutant, and why.

    Examples:
        >>> verdict(0, "3 passed")
        ('survived', '')
        >>> verdict(1, "FAILED tests/test_a.py::test_b - assert 1 == 2")
        ('killed', 'FAILED tests/test_a.py::test_b - assert 1 == 2')
        >>> verdict(-signal.SIGXCPU, "")
        ('timeout', 'exit -24')
    """
    if code == 0:
        return "survived", ""
    lines = [x for x in output.splitlines() if x.startswith(("FAILED", "ERROR", "E  "))]
    why = (lines or output.splitlines()[-1:] or [f"exit {code}"])[0][:200]
    if code == -signal.SIGXCPU or any(TIMED_OUT.search(line) for line in lines):
        return "timeout", why
    # Somebody else ended it, for want of memory for example.
    return ("not run" if code in (-signal.SIGKILL, -signal.SIGTERM) else "killed"), why


TIMED_OUT = re.compile(r"TimeoutExpired|TimeoutError|timed out|Timeout\b")


def summary(rows: list[dict]) -> str:
    counts = {k: sum(r["result"] == k for r in rows) for k in ("killed", "survived", "timeout")}
    run = sum(counts.values())
    text = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    return f"{run} mutants: {text}; {counts['killed'] / max(run, 1):.1%} noticed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--minutes", type=float, default=120, help="the end, come what may")
    parser.add_argument("--tests", nargs="+", default=TESTS, help="what may notice a mutant")
    parser.add_argument("--map", type=Path, help="a file for what tests run through, kept")
    parser.add_argument(
        "--again",
        type=Path,
        help="a file of an earlier run: what was killed there counts as killed",
    )
    parser.add_argument("--out", type=Path, default=Path("mutants.json"))
    parser.add_argument("--list", action="store_true", help="print the mutants and stop")
    options = parser.parse_args()
    until = time.monotonic() + 60 * options.minutes
    mutants = choose(options.count, options.seed)
    rows: list[dict] = []
    if options.again:
        before = {
            (row["file"], *row["span"], row["before"], row["after"]): row
            for row in json.loads(options.again.read_text())["mutants"]
            if row["result"] == "killed"
        }
        keys = [(m.file, *m.span, m.before, m.after) for m in mutants]
        rows = [before[key] for key in keys if key in before]
        mutants = [m for m, key in zip(mutants, keys, strict=True) if key not in before]
    if options.list:
        for mutant in mutants:
            print(
                f"{mutant.file}:{mutant.line} {mutant.operator}: {mutant.before} -> {mutant.after}"
            )
        return
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        copies: SimpleQueue[Path] = SimpleQueue()
        for job in range(options.jobs):
            copies.put(copied(Path(name) / str(job)))
        if options.map and options.map.exists():
            known = json.loads(options.map.read_text())
        else:
            folder = copies.get()
            known = measure_tests(folder, options.jobs, options.tests)
            copies.put(folder)
            if options.map:
                options.map.write_text(json.dumps(known))
        print(f"{len(known['durations'])} tests pass, not used: {known['failed']}", flush=True)

        def run(mutant: Mutant) -> dict:
            if time.monotonic() > until:
                return {**asdict(mutant), "result": "not run", "why": "out of time"}
            folder = copies.get()
            try:
                return judge(mutant, tests_for(mutant, known), known, folder, until)
            finally:
                copies.put(folder)

        with ThreadPoolExecutor(options.jobs) as pool:
            for future in as_completed([pool.submit(run, mutant) for mutant in mutants]):
                row = future.result()
                rows.append(row)
                print(
                    f"{row['result']:<9} {row['file']}:{row['line']} {row['operator']}", flush=True
                )
                report = {"seed": options.seed, "summary": summary(rows), "mutants": rows}
                options.out.write_text(json.dumps(report, indent=1))
    print(summary(rows))
    for row in rows:
        if row["result"] != "killed":
            place = f"{row['result']}: {row['file']}:{row['line']} {row['operator']}"
            print(f"{place}: {row['before']} -> {row['after']} {row['why']}")


if __name__ == "__main__":
    main()
