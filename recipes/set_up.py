"""Make the virtual environment, or bring it up to date. `make setup` runs this, and so does every target.

    python3 -m recipes.set_up .venv cu126 python3.12

The arguments are the folder, the torch to install (a name in BUILDS, or a pip requirement) and the Python to make the
environment from. An empty torch or Python means the same as last time.

This program runs before an environment exists, so it imports only the standard library. It installs uv by pip, and the
rest by uv. requirements.lock has every package but torch, uv too, with hashes; `make lock` renews it. It leaves out
torchaudio, a dependency of fairseq-fixed, because nothing here uses it. Besides, transformers imports torchaudio if it
is installed, and the newest torchaudio does not load next to torch 2.13.

All builds of torch have the version that the tests run with. Since torch 2.11, cu126 is the only build with kernels for
cards before compute capability 7.5, such as the V100 (pytorch#172352); uv's --torch-backend=auto looks only at the
driver. cu126 also works with drivers that are too old for CUDA 13. torch 2.14 is the last version with this build
(pytorch#190385). Only the cpu build has been run.
"""

from __future__ import annotations

import fcntl
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK = Path("requirements.lock")
BUILD = ("cython", "numpy", "setuptools", "wheel")
"""What compiles fairseq-fixed. uv compiles all packages of a list before it installs any, so these come before."""
PARTS = ("ready", "pyvenv.cfg", "bin", "include", "lib", "lib64", "share")
"""The parts to remove before an environment is made again."""
OLDEST = (3, 11)
VERSION = "2.13.0"
BUILDS = ("cpu", "cuda", "cu126")
"""Builds of torch; `cuda` is PyPI's for the current CUDA."""
TODAYS_CAPABILITY, TODAYS_DRIVER = 7.5, 580
"""The oldest card and driver that the build `cuda` supports (NVIDIA's table of minor-version compatibility)."""
CAN_COMPILE = "import ensurepip, os, sysconfig; print(os.stat(sysconfig.get_path('include') + '/Python.h'))"
PIP_TO_UV = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "cert": "SSL_CERT_FILE",
}
"""pip's settings that uv does not read, and uv's names for them. With several indexes, pip takes the best of all."""


def output_of(*command: str | Path) -> str:
    """The output of a command; empty if the command fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def version(python: str | Path) -> str:
    return output_of(python, "-c", 'import sys; print(*sys.version_info[:2], sep=".")')


def base_python(venv: Path, asked: str) -> str:
    """The Python that makes the environment: the one that the user names, else the one used last time, else python3.12
    on Linux if it is there (for it, fairseq-fixed has a wheel, which takes no minutes to compile), else python3.

    Raises:
        ValueError: that Python cannot be run, or is too old.
    """
    python = asked or output_of(venv / "bin/python", "-c", "import sys; print(sys._base_executable)")
    if not python:
        has_wheel = (platform.system(), platform.machine()) == ("Linux", "x86_64")
        python = "python3.12" if has_wheel and output_of("python3.12", "-c", CAN_COMPILE) else "python3"
    release = version(python) or "nothing that can be run"
    if not release[0].isdigit() or tuple(map(int, release.split("."))) < OLDEST:
        raise ValueError(f"{python} is Python {release}; expected 3.11 or newer, as in PYTHON=python3.11.")
    return python


def build_for_cards() -> str:
    """The build of torch for this machine's cards, which nvidia-smi lists."""
    rows = output_of("nvidia-smi", "--query-gpu=compute_cap,driver_version", "--format=csv,noheader")
    cards = re.findall(r"(\d+\.\d+), (\d+)", rows)
    old = any(float(capability) < TODAYS_CAPABILITY or int(driver) < TODAYS_DRIVER for capability, driver in cards)
    return "cu126" if old else "cuda" if cards else "cpu"


@contextmanager
def locked(venv: Path) -> Iterator[None]:
    """Wait until no process runs in the environment (steps/guard.use_environment), and no other process sets it up."""
    venv.mkdir(parents=True, exist_ok=True)
    with (venv / "lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"{venv} must be set up again and is in use. Waiting; VENV= takes another.", file=sys.stderr)
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            print(f"{venv}: {error.strerror}. Make sure that nothing runs in it.", file=sys.stderr)
        yield


def recorded_build(venv: Path) -> str:
    """The torch that the environment was made with; empty if this program did not make the environment."""
    path = venv / "torch"
    return path.read_text(encoding="utf-8").strip() if path.exists() else ""


def asks_for_another(venv: Path, torch: str, python: str) -> bool:
    """Whether torch or Python differ from those of the environment. fairseq is compiled for both."""
    return torch not in ("", recorded_build(venv)) or (bool(python) and version(python) != version(venv / "bin/python"))


def is_current(venv: Path, torch: str, python: str) -> bool:
    """Whether the environment is complete, newer than setup.py and the lock file, and has this torch and Python."""
    ready = venv / "ready"
    if not ready.exists() or any(path.stat().st_mtime > ready.stat().st_mtime for path in (Path("setup.py"), LOCK)):
        return False
    return not asks_for_another(venv, torch, python)


def make(venv: Path, torch: str, python: str) -> None:
    """Make the environment anew, unless a complete one with this torch and Python is there. Record the build of torch,
    so that a machine without a card keeps it.

    Raises:
        ValueError: the environment must be made anew, but this program did not make it: it has no file `torch`.
    """
    chosen, ready = base_python(venv, python), venv / "ready"
    complete = ready.exists() and version(venv / "bin/python") and not asks_for_another(venv, torch, python)
    if not complete and not recorded_build(venv) and any((venv / name).exists() for name in PARTS):
        raise ValueError(f"{venv} was not made by make setup, and would have to be made again. Give another VENV=.")
    (venv / "torch").write_text(f"{torch or recorded_build(venv) or build_for_cards()}\n", encoding="utf-8")
    ready.unlink(missing_ok=True)  # an installation that is cut short may leave a package half installed
    if not complete:
        subprocess.run(["rm", "-rf", *(venv / name for name in PARTS)], check=True)
        subprocess.run([chosen, "-m", "venv", venv], check=True)


def environment_for_uv(python: str) -> dict[str, str]:
    """The environment variables for uv and what it compiles: pip's settings, and how to compile."""
    # The first of several values is the strongest: pip lists its own variables first.
    settings = re.findall(r"^\S+?\.([a-z-]+)='(.*)'$", output_of(python, "-m", "pip", "config", "list"), flags=re.M)
    pip = {}
    for name, value in reversed(settings):
        if name in PIP_TO_UV:
            separator = "," if name == "find-links" else " "
            pip[PIP_TO_UV[name]] = separator.join(value.replace("\\n", " ").split())
    environment = {"UV_INDEX_STRATEGY": "unsafe-best-match", **pip, **os.environ}
    # Without debug information, which the flags of many a Python ask for, C++ with torch's headers compiles in half the
    # time.
    for flags in ("CFLAGS", "CXXFLAGS"):
        environment[flags] = f"{environment.get(flags, '')} -g0"
    # With CUDA_HOME, fairseq-fixed would compile CUDA kernels that nothing here uses, and fail if the versions of the
    # toolkit and of torch differ.
    environment.pop("CUDA_HOME", None)
    return environment


def install(venv: Path) -> None:
    """Install everything. torch comes first, because fairseq-fixed is compiled against the installed torch."""
    asked, python = recorded_build(venv), str(venv / "bin/python")
    message = f"Python {version(python)}, torch ({asked}; TORCH= takes another), fairseq and the tools"
    print(f"Setting up {venv}: {message}, a few minutes.", flush=True)
    quiet = [] if sys.stderr.isatty() else ["-q"]
    pinned = re.split(r"\n(?=\w)", LOCK.read_text(encoding="utf-8"))
    pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--require-hashes", "-r", "/dev/stdin"]
    subprocess.run(pip, input=next(one for one in pinned if one.startswith("uv==")), text=True, check=True)

    uv, environment = [python, "-m", "uv", "pip", "install", "--python", python, *quiet], environment_for_uv(python)
    torch = asked.split()
    if asked in BUILDS:
        plain = asked == "cuda" or (asked == "cpu" and platform.system() != "Linux")  # PyPI's
        torch = [f"torch=={VERSION}" + ("" if plain else f"+{asked}")]
        # pip's index or folder may have the build; else it comes from torch's own index.
        look = [*uv, "-q", "--dry-run", "--no-deps", *torch]
        if not plain and subprocess.run(look, env=environment, capture_output=True).returncode:
            torch += ["--torch-backend", asked]
    bare = ["--no-deps", "--no-build-isolation"]
    build = [*bare, "--constraints", str(LOCK), *BUILD]
    for words in (torch, build, [*bare, "--require-hashes", "-r", str(LOCK)], [*bare, "-e", "."]):
        subprocess.run([*uv, *words], env=environment, check=True)


def main() -> None:
    venv, (torch, python) = Path(sys.argv[1]), map(str.strip, sys.argv[2:])
    try:
        if torch and torch not in BUILDS and not torch.startswith("torch"):
            expected = f"one of {' '.join(BUILDS)}, or pip's, as torch==2.7.1"
            raise ValueError(f"TORCH={torch} is unknown; expected {expected}.")
        if is_current(venv, torch, python):
            return
        with locked(venv):
            if not is_current(venv, torch, python):
                make(venv, torch, python)
                install(venv)
                (venv / "ready").touch()
    except (ValueError, OSError) as error:
        advice = ". Check its permissions and the disk, or give another VENV=." if isinstance(error, OSError) else ""
        print(f"{error}{advice}", file=sys.stderr)
        raise SystemExit(2) from None
    except subprocess.CalledProcessError as error:
        print(f"{venv}: not set up, the command above ended with status {error.returncode}.", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print(f"{venv}: interrupted; make setup begins again, and downloads nothing twice.", file=sys.stderr)
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
