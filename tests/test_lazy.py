"""When the plugin is registered: with fairseq, in whatever order the two are imported, and never without it."""

from __future__ import annotations

import subprocess
import sys

import pytest
from conftest import ROOT
from fairseq.models import ARCH_MODEL_NAME_REGISTRY

import fairseq_admin  # noqa: F401

REGISTERED = "from fairseq.models import MODEL_REGISTRY; assert 'transformer_admin' in MODEL_REGISTRY"


@pytest.mark.parametrize(
    "code",
    [
        f"import fairseq_admin; import fairseq; {REGISTERED}",
        f"import fairseq; import fairseq_admin; {REGISTERED}",
        f"from fairseq_admin.method.norms import shortcut_norms; {REGISTERED}",
        f"from fairseq_admin import radam; {REGISTERED}",
        f"from fairseq_admin import TransformerAdminModel; {REGISTERED}",
    ],
)
def test_registered_with_fairseq(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


# An import of None raises, as that of a package that is not installed.
ABSENT = "import sys; sys.modules.update(dict.fromkeys(['fairseq', 'transformers', 'omegaconf', 'tqdm']))"


@pytest.mark.parametrize("absent", [ABSENT, "import sys"])
def test_the_pytorch_part_needs_torch_alone(absent: str) -> None:
    """Where fairseq and transformers are not installed, and where they are."""
    code = (
        f"{absent}; import fairseq_admin.pytorch; print([m for m in ('fairseq', 'transformers') if sys.modules.get(m)])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stdout == "[]\n"


def test_no_hook_without_fairseq() -> None:
    """Someone else's program keeps its own way to show errors."""
    code = "import sys; import fairseq_admin.pytorch; assert sys.excepthook is sys.__excepthook__"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_hydra_knows_every_registered_name() -> None:
    """It reads the command line before fairseq reads --user-dir; the plugin in hydra_plugins is what tells it."""
    command = [sys.executable, "-m", "fairseq_cli.hydra_train", "model=none"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    names = {name for name, model in ARCH_MODEL_NAME_REGISTRY.items() if "admin" in model}
    assert len(names) > 9 and names <= set(done.stderr.partition("Available options")[2].split()), done.stderr
