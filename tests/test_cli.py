"""The command `fairseq-admin`: its output on stdout and stderr, and its exit status."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import reference
import torch
from conftest import one_line_error, python

from fairseq_admin import cli
from fairseq_admin.checkpoints import averaging, files
from fairseq_admin.checkpoints.checkpoint import Checkpoint
from fairseq_admin.method import provenance
from fairseq_admin.text.assets import Assets
from fairseq_admin.text.tokens import Text
from fairseq_admin.version import __version__

MOVED = "decoder.layers.1.encoder_attn_layer_norm.omega_delta"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Working directory with checkpoints. Four are from one run, whose epochs each raise half of one ω by 0.5."""
    monkeypatch.chdir(tmp_path)
    model = reference.build("transformer_admin_tiny")
    torch.save({"model": model.state_dict()}, "not_profiled.pt")
    torch.manual_seed(7)
    model(*reference.batch())
    for epoch in range(1, 5):
        with torch.no_grad():
            model.get_parameter(MOVED)[:32] += 0.5
        state = {"model": model.state_dict(), "optimizer_history": [{"num_updates": 10 * epoch}]}
        torch.save({**state, "args": {"task": "translation"}, "last_optimizer_state": {}}, f"checkpoint{epoch}.pt")
    return tmp_path


def test_omega_prints_the_checkpoints_numbers(run: Path, capsys: pytest.CaptureFixture) -> None:
    stacks = Checkpoint.read(run / "checkpoint4.pt").omegas
    assert cli.main(["omega", "checkpoint4.pt"]) == 0
    table, err = capsys.readouterr()
    assert not err and table.startswith("omega: rule reference, source_tokens ")
    assert f"seed 7, version {__version__}\n" in table
    expected = [
        [stack, str(number), *name.split(".")[1:], *(f"{it:.4f}" for it in (omega.min(), omega.mean(), omega.max()))]
        for stack, sublayers in stacks.items()
        for number, (name, omega) in enumerate(sublayers.items(), 1)
    ]
    assert [row.split() for row in table.splitlines()[2:]] == expected and len(expected) == 10
    assert cli.main(["omega", "not_profiled.pt"]) == 0
    assert capsys.readouterr().out.startswith("omega: not set yet\n")


def test_average_names_its_files_and_keeps_the_record(run: Path, capsys: pytest.CaptureFixture) -> None:
    assert cli.main("average . --last 2 -o average.pt".split()) == 0
    assert capsys.readouterr().out == "average.pt: average of checkpoint3.pt, checkpoint4.pt\n"
    average = files.read(run / "average.pt")
    assert average["model"][MOVED].tolist() == [1.75] * 32 + [0.0] * 32  # mean of 3 · 0.5 and 4 · 0.5
    assert provenance.decode(average["model"][provenance.KEY])["seed"] == 7


def test_average_notes_the_text_it_was_trained_on(run: Path, capsys: pytest.CaptureFixture) -> None:
    """Does `average --data` record the text's fingerprints, as `fold` does, and refuse another model's text?

    Some models cannot be folded.
    """
    (run / "text/bin").mkdir(parents=True)
    (run / "text/codes").write_text("a b 1\n")
    Text("de", "en").write(run / "text/text.json")
    assert cli.main("average . --last 2 -o average.pt --data text/bin".split()) == 0
    text = Checkpoint.read(run / "average.pt").text
    assert text == {**Checkpoint.read(run / "checkpoint4.pt").text, **Assets(run / "text/model.pt").fingerprints()}
    assert text.keys() == {"encoder", "decoder", "codes", "text.json"}
    reference.dictionary(9).save(str(run / "text/bin/dict.de.txt"))
    message = "dict.de.txt: the dictionary is not the one the model was trained with. Give the folder of the model's"
    assert message in one_line_error(capsys, *"average . --last 2 -o a.pt --data text".split())


@pytest.mark.parametrize("line", ["model.pt x.de --beam 2", "--beam 2 model.pt x.de", "model.pt --beam 2 x.de"])
def test_files_and_options_may_be_in_any_order(line: str) -> None:
    args = cli.parse(["translate", *line.split()])
    assert (args.model.name, args.text.name, args.beam) == ("model.pt", "x.de", 2)


def test_help_answers_at_once() -> None:
    """Does --help import nothing that takes seconds, and state the real default of --last?"""
    code = "import sys; from fairseq_admin import cli; cli.parsers(); print({'torch', 'fairseq'} & {*sys.modules})"
    assert python(code).stdout == "set()\n"
    help_text = " ".join(cli.parsers()[1]["average"].format_help().split())
    assert f"default: {averaging.LAST})" in help_text


def test_version_is_the_packages(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["--version"])
    assert end.value.code == 0 and capsys.readouterr().out == f"{__version__}\n"


def test_a_callers_log_is_as_it_was() -> None:
    cli.main(["omega", "none.pt"])
    assert logging.getLogger("fairseq_admin").isEnabledFor(logging.CRITICAL) and logging.root.manager.disable == 0


def test_the_path_is_what_user_dir_takes(capsys):
    assert cli.main(["path"]) == 0
    assert capsys.readouterr().out == f"{Path(cli.__file__).parent}\n"
