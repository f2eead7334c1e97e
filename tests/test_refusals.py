"""Options that cannot work are refused when the command line is read, also by hydra. (test_schemes.py has others.)"""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import hydra_train
from fairseq import options as fairseq_options

import fairseq_admin.plugin  # noqa: F401  (registers the models)
from fairseq_admin.errors import AdminError

SHARDED = ["transformer_admin", "transformer_lm_admin", "masked_lm_admin", "deeper_admin"]


@pytest.mark.parametrize("arch", [*SHARDED, *(f"{name}_tiny" for name in SHARDED)])
def test_fully_sharded(arch: str) -> None:
    """Fully sharded training is refused when the command line is parsed, before any data is read."""
    task = "translation" if arch.startswith("transformer_admin") else "language_modeling"
    arguments = ["data", "--task", task, "--arch", arch, "--ddp-backend"]
    parser = fairseq_options.get_training_parser()
    with pytest.raises(AdminError, match="^--ddp-backend fully_sharded was given.* Leave it out"):
        fairseq_options.parse_args_and_arch(parser, [*arguments, "fully_sharded"])
    fairseq_options.parse_args_and_arch(fairseq_options.get_training_parser(), [*arguments, "legacy_ddp"])


def test_options_under_hydra(corpus: Path, tmp_path: Path) -> None:
    """fairseq-hydra-train gives the same error, although hydra catches every error and formats it itself."""
    run = hydra_train(corpus, tmp_path, "_name: transformer_admin_tiny, admin_profile_tokens: 0")
    assert run.status != 0 and "--admin-profile-tokens is 0" in run.output, run.output[-3000:]
    assert not list(tmp_path.glob("*.pt"))
