"""The plugin registers when fairseq is loaded, by --user-dir, by our commands, or on access to a class."""

from __future__ import annotations

import subprocess
import sys

import pytest
from conftest import ROOT, python
from fairseq.models import ARCH_MODEL_NAME_REGISTRY

REGISTERED = "from fairseq.models import MODEL_REGISTRY; assert 'transformer_admin' in MODEL_REGISTRY"


@pytest.mark.parametrize(
    "code",
    [
        f"import fairseq; import fairseq_admin; {REGISTERED}",
        f"from fairseq_admin import TransformerAdminModel; {REGISTERED}",
        f"from fairseq_admin import cli; assert cli.main(['omega', 'none.pt']) == 2; {REGISTERED}",
    ],
)
def test_the_plugin_is_registered(code: str) -> None:
    python(code)


ABSENT = "import sys; sys.modules.update(dict.fromkeys(['fairseq', 'transformers', 'hydra', 'omegaconf', 'tqdm']))"
"""Importing a module that is None in sys.modules fails as if the package were not installed."""


@pytest.mark.parametrize("module", ["fairseq_admin.pytorch", "fairseq_admin"])
def test_importing_needs_no_fairseq_and_changes_nothing(module: str) -> None:
    """An import changes neither import machinery nor error display, and imports no fairseq."""
    code = f"{ABSENT}; finders = sys.meta_path[:]; import {module}\n"
    python(f"{code}assert sys.meta_path == finders and sys.excepthook is sys.__excepthook__")


def test_the_pytorch_half_needs_no_fairseq() -> None:
    python(
        f"{ABSENT}; from fairseq_admin import attach, diagnose, fold; assert 'fairseq_admin.plugin' not in sys.modules"
    )


def test_without_fairseq_a_command_names_the_extra() -> None:
    code = f"{ABSENT}; from fairseq_admin import cli; sys.exit(cli.main(['omega', 'model.pt']))"
    process = python(code, status=2)
    assert process.stderr.startswith("fairseq-admin: fairseq is not installed. Run pip install ")
    assert "'fairseq-admin[fairseq]'" in process.stderr and len(process.stderr.splitlines()) == 1


def test_other_programs_with_hydra_do_not_import_the_package() -> None:
    """Other programs with hydra import only our module under hydra_plugins, not the package."""
    code = (
        "import sys; from hydra.core.plugins import Plugins; Plugins.instance()\n"
        "print([m for m in ('hydra_plugins.fairseq_admin', 'fairseq_admin', 'fairseq') if m in sys.modules])"
    )
    assert python(code).stdout == "['hydra_plugins.fairseq_admin']\n"


def test_hydra_knows_every_registered_name() -> None:
    """Hydra knows our names from hydra_plugins: it reads the command line before fairseq reads --user-dir."""
    command = [sys.executable, "-m", "fairseq_cli.hydra_train", "model=none"]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    names = {name for name, model in ARCH_MODEL_NAME_REGISTRY.items() if "admin" in model}
    assert len(names) > 9 and names <= set(process.stderr.partition("Available options")[2].split()), process.stderr
