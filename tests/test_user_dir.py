"""All ways to give `--user-dir`, with the package installed or not, in real processes of one update each.

fairseq imports a user-dir by its folder's name and refuses a second module of that name, so an installed package and a
path must not conflict.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import fairseq
import fairseq_cli
import pytest
from conftest import ROOT, TRAIN

from fairseq_admin.checkpoints import files
from fairseq_admin.method import provenance
from fairseq_admin.version import __version__

INSTALLED = __version__ + ".dev1"
"""Version of the installed copy. It distinguishes the copy from the repository."""


def environment(folder: Path, *install: str) -> Path:
    """Make a virtual environment with this one's packages, and let pip install a copy of ours. Returns its python.

    fairseq also looks for a user-dir next to itself, so it must be in the folder that pip installs into.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
    python = folder / "venv" / "bin" / "python"
    code = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    packages = Path(subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip())
    (packages / "parent.pth").write_text(
        "\n".join(dict.fromkeys(sysconfig.get_paths()[k] for k in ("purelib", "platlib")))
    )
    for module in (fairseq, fairseq_cli):  # a folder of links: if it were a link itself, its ".." would be its target's
        (packages / module.__name__).mkdir()
        for item in Path(next(iter(module.__path__))).iterdir():
            (packages / module.__name__ / item.name).symlink_to(item)
    copy = folder / "copy"
    copy.mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, copy)
    for package in ("fairseq_admin", "hydra_plugins"):
        shutil.copytree(ROOT / package, copy / package, ignore=shutil.ignore_patterns("__pycache__"))
    version = copy / "fairseq_admin" / "version.py"
    version.write_text(version.read_text().replace(f'"{__version__}"', f'"{INSTALLED}"'))
    pip = [str(python), "-m", "pip", "install", "--no-index", "--no-deps", "--no-build-isolation", "-q", *install]
    process = subprocess.run([*pip, str(copy)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.returncode == 0, process.stdout[-4000:]
    return python


@pytest.fixture(scope="module")
def pythons(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function from a name to a Python. "ours" is the Python of these tests.

    "installed" is an environment with a copy installed as from PyPI, and "editable" one with an editable copy.
    """
    install = {"installed": (), "editable": ("-e",)}

    @functools.cache
    def python(name: str) -> Path:
        return environment(tmp_path_factory.mktemp(name), *install[name]) if name in install else Path(sys.executable)

    return python


installed = pytest.mark.nightly


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "user_dir", "cwd", "version"),
    [
        ("ours", f"{ROOT}/fairseq_admin/", ".", __version__),
        pytest.param("installed", "fairseq_admin", ".", INSTALLED, marks=installed),
        pytest.param("installed", f"{ROOT}/fairseq_admin", ".", __version__, marks=installed),  # a different copy
        pytest.param("editable", "COPY/fairseq_admin", ".", INSTALLED, marks=installed),  # the installed copy itself
        pytest.param("editable", "fairseq_admin", "COPY", INSTALLED, marks=installed),
    ],
)
def test_omega_is_of_the_plugin_that_user_dir_names(
    name: str, user_dir: str, cwd: str | Path, version: str, corpus: Path, tmp_path: Path, pythons: Callable
) -> None:
    """After one update, does ω come from the intended plugin?"""
    python = pythons(name)
    copy = str(python.parents[2] / "copy")
    options = [*TRAIN[2:], "--user-dir", user_dir.replace("COPY", copy), "--disable-validation", "--max-update", "1"]
    inherited = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    process = subprocess.run(
        [str(python), "-m", "fairseq_cli.train", str(corpus), *options, "--save-dir", str(tmp_path)],
        cwd=tmp_path / str(cwd).replace("COPY", copy), env=inherited, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, timeout=120,
    )  # fmt: skip
    assert process.returncode == 0, process.stdout[-4000:]
    assert process.stdout.count("Admin: profiled by rule") == 1
    record = provenance.decode(files.read(tmp_path / "checkpoint_last.pt")["model"][provenance.KEY])
    assert record is not None and record["version"] == version
