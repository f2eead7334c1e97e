"""Make the virtual environment, or bring it up to date; what `make setup` runs, and any target that needs it.

    python3 -m recipes.set_up .venv --torch cu126 --python python3.12

It runs before there is an environment, so it imports Python's own library alone. requirements.lock has everything but
torch, with hashes; `make lock` renews it. torchaudio, which fairseq-fixed asks for, is not in it: nothing here uses it,
transformers imports it where it is, and its newest does not load next to torch 2.13.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from recipes import torch_build

LOCK = Path("requirements.lock")
# What fairseq-fixed is built with; pip prepares all of a list before it installs any of it.
BUILD = ("cython", "numpy", "setuptools", "wheel")
PARTS = ("ready", "pyvenv.cfg", "bin", "include", "lib", "lib64", "share")
"""What is removed of an environment that is made again."""
OLDEST = (3, 11)


def says(python: str | Path, program: str) -> str:
    """What a Python prints; nothing if it cannot be run."""
    try:
        done = subprocess.run([python, "-c", program], capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def version(python: str | Path) -> str:
    return says(python, 'import sys; print(*sys.version_info[:2], sep=".")')


def base(venv: Path, asked: str) -> str:
    """The Python to make it from: the one asked for, or that of before, or python3.

    Raises:
        ValueError: it cannot be run, or is too old.
    """
    python = asked or says(venv / "bin/python", "import sys; print(sys._base_executable)") or "python3"
    if not (found := version(python)):
        raise ValueError(f"PYTHON={python} cannot be run; expected a Python of 3.11 or newer, as in PYTHON=python3.11.")
    if tuple(map(int, found.split("."))) < OLDEST:
        raise ValueError(f"{python} is Python {found}; expected 3.11 or newer, as in PYTHON=python3.11.")
    return python


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Wait until no other process is in a block of the same path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"Another process has {path}. Waiting for its end.", file=sys.stderr)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def is_current(venv: Path, torch: str, python: str) -> bool:
    """Whether it is whole, newer than what it is made from, and of the torch and the Python that are asked for."""
    ready = venv / "ready"
    if not ready.exists() or any(path.stat().st_mtime > ready.stat().st_mtime for path in (Path("setup.py"), LOCK)):
        return False
    return not differs(venv, torch, python)


def differs(venv: Path, torch: str, python: str) -> bool:
    """Whether another torch, or another Python, is asked for: fairseq is compiled for both."""
    held = venv / "torch"
    other_torch = bool(torch) and (not held.exists() or held.read_text(encoding="utf-8").strip() != torch)
    return other_torch or (bool(python) and version(python) != version(venv / "bin/python"))


def make(venv: Path, torch: str, python: str) -> None:
    """Make it again from nothing where it must be; only one that was made here is, which has the file `torch`.

    Raises:
        ValueError: it was made by somebody else.
    """
    chosen = base(venv, python)
    if says(venv / "bin/python", "import pip; print(pip)") and not differs(venv, torch, python):
        return
    held = venv / "torch"
    if not held.exists() and any((venv / name).exists() for name in PARTS):
        raise ValueError(f"{venv} was not made by make setup, and would have to be made again. Give another VENV=.")
    for name in PARTS:
        path = venv / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    if torch or not held.exists():
        held.write_text(f"{torch}\n", encoding="utf-8")
    subprocess.run([chosen, "-m", "venv", venv], check=True)


def install(venv: Path) -> None:
    """torch first: fairseq-fixed is compiled against it. In a build of its own pip would fetch a second torch."""
    # Where CUDA_HOME is set, fairseq-fixed compiles CUDA kernels that nothing here uses, and stops at a toolkit of
    # another version than torch's.
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_HOME"}
    quiet = [] if sys.stderr.isatty() else ["-q"]
    pip: list[str | Path] = [venv / "bin/python", "-m", "pip", "install", "--disable-pip-version-check", *quiet]
    locked = [*pip, "--no-deps", "--no-build-isolation", "--require-hashes"]
    pinned = re.split(r"\n(?=\w)", LOCK.read_text(encoding="utf-8"))
    torch = torch_build.arguments(venv / "torch")
    build = venv / "build.lock"
    build.write_text("\n".join(one for one in pinned if one.startswith(tuple(f"{name}==" for name in BUILD))) + "\n")
    commands: list[list[str | Path]] = [
        [*pip, "--no-deps", *torch],
        [*pip, torch[0]],
        [*locked, "-r", build],
        [*locked, "-r", LOCK],
        [*pip, "--no-deps", "--no-build-isolation", "-e", "."],
    ]
    for command in commands:
        subprocess.run(command, env=environment, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("venv", type=Path)
    parser.add_argument("--torch", default="", help="a build of torch, or a requirement of pip; empty: as before")
    parser.add_argument("--python", default="", help="the Python to make it from; empty: as before")
    args = parser.parse_args()
    torch = args.torch.strip()
    try:
        torch_build.check(torch)
        if args.python:
            base(args.venv, args.python)
        if is_current(args.venv, torch, args.python):
            return
        with alone(args.venv / "lock"):
            if not is_current(args.venv, torch, args.python):
                print(f"Setting up {args.venv}: torch, fairseq and the tools, a few minutes.", flush=True)
                make(args.venv, torch, args.python)
                install(args.venv)
                (args.venv / "ready").touch()
    except ValueError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None
    except subprocess.CalledProcessError as error:
        print(f"{args.venv}: not set up, the command above ended with status {error.returncode}.", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
