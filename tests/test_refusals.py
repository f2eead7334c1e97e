"""Options that cannot work are refused with status 2 and one last line that names the option, without a traceback."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import TRAIN, Run, hydra_train
from fairseq import options as fairseq_options

import fairseq_admin.plugin  # noqa: F401  (registers the models)
from fairseq_admin.errors import AdminError


def check_refusal(done: Run, *parts: str) -> None:
    """Check for status 2, no traceback, and every part in the last line."""
    last = done.output.splitlines()[-1]
    assert done.status == 2 and last.startswith("fairseq-admin: "), done.output[-3000:]
    assert "Traceback" not in done.output
    for part in parts:
        assert part in last


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ("--decoder-layers-to-keep 0,2", ["fairseq-admin: --decoder-layers-to-keep is 0,2", "from 0 to 1"]),
        ("--admin-init fixup", ["argument --admin-init: invalid choice: 'fixup'", "reference"]),  # argparse's own
    ],
)
def test_options(given: str, parts: list[str], corpus: Path, tmp_path: Path, run: Callable[..., Run]) -> None:
    """The error names the option and the expected value. (test_schemes.py has other refusals.)"""
    done = run("fairseq_cli.train", corpus, *TRAIN, *given.split(), "--save-dir", tmp_path, "--max-update", 1)
    last = done.output.splitlines()[-1]
    assert done.status == 2 and all(part in last for part in parts), done.output[-3000:]
    assert "Traceback" not in done.output and not list(tmp_path.glob("*.pt"))


SHARDED = ["transformer_admin", "transformer_lm_admin", "masked_lm_admin", "deeper_admin"]


@pytest.mark.parametrize("arch", [*SHARDED, *(f"{name}_tiny" for name in SHARDED)])
def test_fully_sharded(arch: str) -> None:
    """Fully sharded training is refused when the command line is parsed, before any data is read."""
    task = "translation" if arch.startswith("transformer_admin") else "language_modeling"
    given = ["data", "--task", task, "--arch", arch, "--ddp-backend"]
    parser = fairseq_options.get_training_parser()
    with pytest.raises(AdminError, match="^--ddp-backend fully_sharded was given.* Leave it out"):
        fairseq_options.parse_args_and_arch(parser, [*given, "fully_sharded"])
    fairseq_options.parse_args_and_arch(fairseq_options.get_training_parser(), [*given, "legacy_ddp"])


@pytest.mark.parametrize(
    ("model", "parts"),
    [
        ("admin_profile_tokens: 0", ["--admin-profile-tokens is 0"]),
        ("admin_init: fixup", ["fixup", "reference", "paper", "log", "constant"]),
    ],
)
def test_options_under_hydra(model: str, parts: list[str], corpus: Path, tmp_path: Path) -> None:
    """fairseq-hydra-train gives the same error, although hydra catches every error and formats it itself."""
    done = hydra_train(corpus, tmp_path, f"_name: transformer_admin_tiny, {model}")
    assert done.status != 0
    assert any(all(part in line for part in parts) for line in done.output.splitlines()), done.output[-3000:]
    assert not list(tmp_path.glob("*.pt"))
