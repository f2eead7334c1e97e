"""`--user-dir` in every way a user may give it, with the package installed or not: real processes, one update each.

fairseq imports a user-dir by its folder's name and refuses a second module of that name, so neither an installed
package nor a path may get in the other's way.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import fairseq
import fairseq_cli
import pytest
from conftest import ROOT, TRAIN

from fairseq_admin.checkpoints import files
from fairseq_admin.method import provenance
from fairseq_admin.version import __version__

pytestmark = pytest.mark.slow
INSTALLED = __version__ + ".dev1"
"""Version of the installed copy, to tell it from the repository."""


def train(python: Path, user_dir: str, cwd: Path, corpus: Path, folder: Path) -> str:
    """One update in a process of its own. Returns the version of the plugin that profiled ω."""
    options = [
        *TRAIN[2:],
        "--user-dir",
        user_dir,
        "--disable-validation",
        "--max-update",
        "1",
        "--save-dir",
        str(folder),
    ]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [str(python), "-m", "fairseq_cli.train", str(corpus), *options],
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert done.stdout.count("Admin: profiled by rule") == 1
    record = provenance.decode(files.read(folder / "checkpoint_last.pt")["model"][provenance.KEY])
    assert record is not None
    return record["version"]


def environment(folder: Path, *install: str) -> Path:
    """A virtual environment with this one's packages and, installed by pip as told, a copy of ours. Returns its python.

    fairseq also looks for a user-dir next to itself, so it has to be in the same folder as what pip installs.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
    python = folder / "venv" / "bin" / "python"
    code = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    packages = Path(subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip())
    (packages / "parent.pth").write_text(
        "\n".join(dict.fromkeys(sysconfig.get_paths()[k] for k in ("purelib", "platlib")))
    )
    for module in (fairseq, fairseq_cli):  # a folder of links: a link's own ".." would be its target's
        (packages / module.__name__).mkdir()
        for item in Path(next(iter(module.__path__))).iterdir():
            (packages / module.__name__ / item.name).symlink_to(item)
    copy = folder / "copy"
    copy.mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, copy)
    shutil.copytree(ROOT / "fairseq_admin", copy / "fairseq_admin", ignore=shutil.ignore_patterns("__pycache__"))
    version = copy / "fairseq_admin" / "version.py"
    version.write_text(version.read_text().replace(f'"{__version__}"', f'"{INSTALLED}"'))
    pip = [str(python), "-m", "pip", "install", "--no-index", "--no-deps", "--no-build-isolation", "-q", *install]
    done = subprocess.run([*pip, str(copy)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
    return python


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The python of an environment in which the package is installed as from PyPI."""
    return environment(tmp_path_factory.mktemp("installed"))


@pytest.fixture(scope="module")
def editable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The python of an environment in which the package is installed in editable mode."""
    return environment(tmp_path_factory.mktemp("editable"), "-e")


def test_bare_name_at_the_root(corpus: Path, tmp_path: Path) -> None:
    """Does the README's command work in the repository's root?"""
    assert train(Path(sys.executable), "fairseq_admin", ROOT, corpus, tmp_path) == __version__


@pytest.mark.parametrize("slash", ["", "/"])
def test_absolute_path(slash: str, corpus: Path, tmp_path: Path) -> None:
    """Does a path work from any folder?"""
    assert train(Path(sys.executable), f"{ROOT / 'fairseq_admin'}{slash}", tmp_path, corpus, tmp_path) == __version__


def test_bare_name_when_installed(corpus: Path, installed: Path, tmp_path: Path) -> None:
    """Does the name work in any folder once the package is installed, and mean the installed one?"""
    assert train(installed, "fairseq_admin", tmp_path, corpus, tmp_path) == INSTALLED


@pytest.mark.parametrize("kind", ["installed", "editable"])
@pytest.mark.parametrize("slash", ["", "/"])
def test_path_when_installed(
    slash: str, kind: str, corpus: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Does a path to another copy mean that copy, whatever is installed?"""
    python = request.getfixturevalue(kind)
    assert train(python, f"{ROOT / 'fairseq_admin'}{slash}", tmp_path, corpus, tmp_path) == __version__


def test_path_to_the_editable_copy(corpus: Path, editable: Path, tmp_path: Path) -> None:
    """Does a path to the very copy that is installed work?"""
    copy = editable.parent.parent.parent / "copy"
    assert train(editable, str(copy / "fairseq_admin"), tmp_path, corpus, tmp_path) == INSTALLED
    assert train(editable, "fairseq_admin", copy, corpus, tmp_path / "root") == INSTALLED


@pytest.mark.parametrize("kind", ["installed", "editable"])
def test_console_script(kind: str, request: pytest.FixtureRequest) -> None:
    """Is the command fairseq-admin installed, and is it ours?"""
    script = request.getfixturevalue(kind).with_name("fairseq-admin")
    done = subprocess.run([script, "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, INSTALLED), done.stderr
