"""Draw faults at random in the mathematics, the checkpoints and the text, and count those that a test catches.

    python tests/mutations.py --seed 33 --count 40 --copy FOLDER -o TABLE.csv

A fault is one operator, comparison, number or condition changed. Each is tried in a copy of the checkout, with the
quick tests of the files nearest to it, until one fails. Rows that the table has already are not tried again.
mutations.csv has what was found at two commits, 40 faults at each, and below them those that were not caught and are
still in the code, tried again with the tests that were written for them; and eight faults of pytorch/reading.py, drawn
by the same seed, for eight of the 40 were in a table that it no longer has. A fault is called equivalent where the
program computes the same with it.
"""

from __future__ import annotations

import argparse
import ast
import csv
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WHERE = (
    "method/*.py",
    "pytorch/*.py",
    "checkpoints/*.py",
    "text/*.py",
    "radam.py",
    "schedule.py",
)
NEAREST = 6
ALWAYS = {
    "pytorch": ["test_pytorch.py", "test_pytorch_sites.py"],
    "method": ["test_schemes.py", "test_oracle.py", "test_deeper.py", "test_deeper_commands.py"],
    "text": ["test_text.py", "test_text_steps.py", "test_translate.py"],
    "checkpoints": ["test_cli.py", "test_commands.py", "test_analysis_command.py"],
}
"""Test files that see a package through others, which import it."""
SWAPS = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.Pow: ast.Mult,
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
    ast.And: ast.Or,
    ast.Or: ast.And,
}


def changes(tree: ast.AST) -> Iterator[tuple[ast.AST, str, object]]:
    """Every (node, field, other value) that is a fault."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.BinOp, ast.AugAssign, ast.BoolOp)) and type(node.op) in SWAPS:
            yield node, "op", SWAPS[type(node.op)]()
        elif isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
            yield node, "ops", [SWAPS[type(node.ops[0])](), *node.ops[1:]]
        elif isinstance(node, (ast.If, ast.IfExp, ast.While)):
            yield node, "test", ast.UnaryOp(ast.Not(), node.test)
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield node, "value", not node.value
        elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
            yield node, "value", node.value + 1


def draw(seed: int, count: int) -> list[tuple[str, int]]:
    """Files, from the package's root, and which of a file's changes each is."""
    package = ROOT / "fairseq_admin"
    paths = sorted(path for pattern in WHERE for path in package.glob(pattern))
    every = [
        (str(path.relative_to(ROOT)), i) for path in paths for i, _ in enumerate(changes(ast.parse(path.read_text())))
    ]
    return random.Random(seed).sample(every, count)


def naming(stem: str, folder: Path) -> list[Path]:
    """The files of a folder that import a module."""
    name = re.compile(rf"^\s*(from [\w.]*\b{stem} import|(from|import) .*\b{stem}\b)", re.MULTILINE)
    return [path for path in sorted(folder.rglob("*.py")) if path.stem != stem and name.search(path.read_text())]


def tests_of(file: str) -> list[str]:
    """The module's own, those that import it, those that import what does; of them NEAREST; and those of ALWAYS."""
    stem, tests = Path(file).stem, ROOT / "tests"
    paths = [tests / f"test_{stem}.py", *naming(stem, tests)]
    for user in naming(stem, ROOT / "fairseq_admin"):
        paths += [tests / f"test_{user.stem}.py", *naming(user.stem, tests)]
    files = [str(path.relative_to(ROOT)) for path in dict.fromkeys(paths) if path.exists() and path.match("test_*.py")]
    return list(dict.fromkeys(files[:NEAREST] + [f"tests/{name}" for name in ALWAYS.get(Path(file).parent.name, [])]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=33)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--copy", type=Path, required=True, help="a folder for the copy")
    parser.add_argument("-o", "--output", type=Path, required=True)
    args = parser.parse_args()
    rows = list(csv.DictReader(args.output.open())) if args.output.exists() else []
    if not args.copy.exists():
        shutil.copytree(ROOT, args.copy, ignore=shutil.ignore_patterns(".venv", "runs"))
    for number, (file, which) in enumerate(draw(args.seed, args.count)):
        if number < len(rows):
            continue
        original = (ROOT / file).read_text()
        tree = ast.parse(original)
        node, field, value = list(changes(tree))[which]
        before = ast.unparse(node).splitlines()[0]
        setattr(node, field, value)
        after = ast.unparse(ast.fix_missing_locations(node)).splitlines()[0]
        (args.copy / file).write_text(ast.unparse(tree))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not nightly", *tests_of(file)]
        try:
            status = subprocess.run(command, cwd=args.copy, capture_output=True, timeout=900).returncode
        except subprocess.TimeoutExpired:
            status = "timeout"
        (args.copy / file).write_text(original)
        line = node.lineno
        rows.append({"file": file, "line": line, "before": before, "after": after, "caught": status != 0})
        with args.output.open("w", newline="") as out:
            writer = csv.DictWriter(out, rows[0].keys(), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        print(number, file, line, before, "->", after, "caught" if status else "NOT CAUGHT", flush=True)


if __name__ == "__main__":
    main()
