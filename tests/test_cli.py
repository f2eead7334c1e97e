"""The command `fairseq-admin`: what it prints, where, and its exit status."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import subprocess
import sys

import pytest
import reference
import torch
from conftest import ROOT

from fairseq_admin import cli
from fairseq_admin.checkpoints import averaging, files
from fairseq_admin.checkpoints.checkpoint import Checkpoint
from fairseq_admin.method import provenance
from fairseq_admin.text.assets import Assets
from fairseq_admin.text.tokens import Text
from fairseq_admin.version import __version__


@pytest.fixture
def run_folder(tmp_path):
    """A run of four epochs: profiled once, ω moved on by 0.5 an epoch in one sub-layer."""
    model = reference.build("transformer_admin_tiny")
    torch.manual_seed(7)
    model(*reference.batch())
    for epoch in range(1, 5):
        with torch.no_grad():
            model.decoder.layers[1].encoder_attn_layer_norm.omega_delta[:32] += 0.5
        state = {
            "model": model.state_dict(),
            "optimizer_history": [{"num_updates": 10 * epoch}],
            "last_optimizer_state": {},
        }
        torch.save(state, tmp_path / f"checkpoint{epoch}.pt")
    return tmp_path


def test_omega_table(run_folder, capsys):
    path = run_folder / "checkpoint4.pt"
    assert cli.main(["omega", str(path)]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0].startswith("profiled: rule reference, source_tokens ") and "seed 7" in lines[0]
    assert lines[1].split() == ["stack", "sub-layer", "layer", "kind", "min", "mean", "max"]
    rows = [line.split() for line in lines[2:]]
    kinds = [["encoder", k] for _ in range(2) for k in ("self_attn", "ffn")]
    kinds += [["decoder", k] for _ in range(2) for k in ("self_attn", "encoder_attn", "ffn")]
    assert [[row[0], row[3]] for row in rows] == kinds
    assert [int(row[1]) for row in rows] == [1, 2, 3, 4, 1, 2, 3, 4, 5, 6]
    assert [int(row[2]) for row in rows] == [0, 0, 1, 1, 0, 0, 0, 1, 1, 1]
    norm = files.read(path)["model"]["decoder.layers.1.encoder_attn_layer_norm.omega_init"][0].item()
    assert rows[8][4:] == [f"{norm:.4f}", f"{norm + 1:.4f}", f"{norm + 2:.4f}"]
    assert rows[0][4:] == ["1.0000"] * 3
    assert not err


def test_omega_json(run_folder, capsys):
    assert cli.main(["omega", "--json", str(run_folder / "checkpoint1.pt")]) == 0
    table = json.loads(capsys.readouterr().out)
    assert list(table) == ["encoder", "decoder", "provenance"]
    assert [len(table[stack]) for stack in ("encoder", "decoder")] == [4, 6]
    assert table["provenance"]["rule"] == "reference" and table["provenance"]["version"] == __version__
    entry = table["decoder"][4]
    assert (entry["layer"], entry["sublayer"]) == (1, "encoder_attn")
    assert entry["max"] - entry["min"] == pytest.approx(0.5, abs=1e-6)
    assert entry["mean"] == pytest.approx((entry["min"] + entry["max"]) / 2, abs=1e-6)


def test_omega_before_profiling(tmp_path, capsys):
    torch.save({"model": reference.build("transformer_admin_tiny").state_dict()}, tmp_path / "c.pt")
    assert cli.main(["omega", str(tmp_path / "c.pt")]) == 0
    assert capsys.readouterr().out.startswith("profiled: not yet\n")


def test_omega_of_a_stock_model(tmp_path, capsys):
    torch.save({"model": reference.build("transformer", **reference.TINY).state_dict()}, tmp_path / "c.pt")
    assert cli.main(["omega", str(tmp_path / "c.pt")]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("fairseq-admin: ") and "has no omega" in err and err.count("\n") == 1


def test_missing_file_is_one_line_and_status_2(tmp_path, capsys):
    assert cli.main(["omega", str(tmp_path / "none.pt")]) == 2
    out, err = capsys.readouterr()
    assert (
        not out
        and err == f"fairseq-admin: {tmp_path / 'none.pt'}: no such file; a fairseq checkpoint (.pt) was expected.\n"
    )


def test_average_last(run_folder, capsys):
    output = run_folder / "average.pt"
    assert cli.main(["average", str(run_folder), "--last", "2", "-o", str(output)]) == 0
    assert capsys.readouterr().out == f"{output}: average of checkpoint3.pt, checkpoint4.pt\n"
    model = files.read(output)["model"]
    learned = model["decoder.layers.1.encoder_attn_layer_norm.omega_delta"]
    assert learned.tolist() == [1.75] * 32 + [0.0] * 32  # the mean of 3 · 0.5 and 4 · 0.5
    assert provenance.decode(model[provenance.KEY])["seed"] == 7
    assert "last_optimizer_state" not in files.read(output)
    reloaded = reference.build("transformer_admin_tiny", seed=3)
    reloaded.load_state_dict(model)
    assert reloaded.profiled


def test_average_notes_the_text_it_was_trained_on(run_folder, capsys):
    """With --data; so a model that no stock Transformer computes knows its files as a folded one does."""
    text = run_folder / "text"
    (text / "bin").mkdir(parents=True)
    (text / "codes").write_text("a b 1\n")
    Text("de", "en").write(text / "text.json")
    given = ["average", str(run_folder), "--last", "2", "-o", str(run_folder / "average.pt"), "--data"]
    assert cli.main([*given, str(text / "bin")]) == 0
    averaged = Checkpoint.read(run_folder / "average.pt")
    assets = Assets(text / "model.pt")
    assert averaged.text == {**Checkpoint.read(run_folder / "checkpoint4.pt").text, **assets.fingerprints()}
    assert averaged.text.keys() == {"encoder", "decoder", "codes", "text.json"}
    capsys.readouterr()
    assert cli.main([*given, str(text / "none")]) == 2
    assert f"fairseq-admin: --data {text / 'none'}: no such folder" in capsys.readouterr().err


def test_average_of_files(run_folder, capsys):
    paths = [str(run_folder / f"checkpoint{n}.pt") for n in (4, 1)]
    assert cli.main(["average", *paths, "-o", str(run_folder / "average.pt")]) == 0
    learned = files.read(run_folder / "average.pt")["model"]["decoder.layers.1.encoder_attn_layer_norm.omega_delta"]
    assert learned[0].item() == 1.25


@pytest.mark.parametrize("inputs", [["checkpoint3.pt", "checkpoint4.pt"], [".", "--last", "2"]])
def test_average_over_one_of_its_inputs_is_refused(run_folder, capsys, inputs, monkeypatch):
    before = (run_folder / "checkpoint4.pt").read_bytes()
    monkeypatch.chdir(run_folder)
    assert cli.main(["average", *inputs, "-o", str(run_folder / "checkpoint4.pt")]) == 2
    assert "checkpoint4.pt would overwrite its input checkpoint4.pt; give another --output" in capsys.readouterr().err
    assert (run_folder / "checkpoint4.pt").read_bytes() == before


def test_average_of_too_few(run_folder, capsys):
    assert cli.main(["average", str(run_folder), "-o", str(run_folder / "average.pt")]) == 2
    assert "holds 4 checkpoints numbered by epochs and the last 10 were asked for" in capsys.readouterr().err
    assert not (run_folder / "average.pt").exists()


@pytest.mark.parametrize("last", ["0", "-1", "x"])
def test_last_must_be_positive(run_folder, capsys, last):
    with pytest.raises(SystemExit) as end:
        cli.main(["average", str(run_folder), f"--last={last}", "-o", "x.pt"])
    assert end.value.code == 2
    assert "--last" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["fold"], ["omega"], ["average", "a.pt"]])
def test_wrong_usage_is_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(arguments)
    err = capsys.readouterr().err
    assert (
        end.value.code == 2 and err.startswith("fairseq-admin") and err.endswith(" --help.\n") and err.count("\n") == 1
    )


def test_a_callers_log_is_as_it_was(tmp_path, capsys):
    log = logging.getLogger("fairseq_admin")
    before = log.level
    cli.main(["omega", str(tmp_path / "none.pt")])
    assert log.level == before


def test_a_name_that_is_not_utf8_is_printed(run_folder, monkeypatch):
    """Standard output refuses such letters, standard error does not; what was done is done by then."""
    output, stream = run_folder / os.fsdecode(b"caf\xe9.pt"), io.TextIOWrapper(io.BytesIO(), "utf-8")
    monkeypatch.setattr(sys, "stdout", stream)
    assert cli.main(["average", str(run_folder), "--last", "2", "-o", str(output)]) == 0
    assert (
        stream.buffer.getvalue().decode() == f"{run_folder}/caf\\udce9.pt: average of checkpoint3.pt, checkpoint4.pt\n"
    )
    assert output.exists()


def test_version(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["--version"])
    assert end.value.code == 0 and capsys.readouterr().out == f"{__version__}\n"


def test_average_of_different_runs_is_refused(tmp_path, capsys):
    """Equal shapes, different provenance: the mean of the records would be no record."""
    for n, rule in enumerate(("log", "constant")):
        model = reference.build("transformer_admin_tiny", admin_init=rule, seed=n).state_dict()
        torch.save({"model": model, "optimizer_history": [{"num_updates": n}]}, tmp_path / f"checkpoint{n}.pt")
    assert cli.main(["average", str(tmp_path), "--last", "2", "-o", str(tmp_path / "average.pt")]) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and "omega was profiled with rule log in the first and constant in" in err
    assert not list(tmp_path.glob("average*"))


def test_average_upto_and_by(run_folder, capsys):
    output = str(run_folder / "average.pt")
    assert cli.main(["average", str(run_folder), "--last", "2", "--upto", "3", "-o", output]) == 0
    assert capsys.readouterr().out.endswith("average of checkpoint2.pt, checkpoint3.pt\n")
    for epoch in (1, 2):
        (run_folder / f"checkpoint{epoch}.pt").rename(run_folder / f"checkpoint_{epoch}_{10 * epoch}.pt")
    assert cli.main(["average", str(run_folder), "--by", "updates", "--last", "2", "-o", output]) == 0
    assert capsys.readouterr().out.endswith("average of checkpoint_1_10.pt, checkpoint_2_20.pt\n")


@pytest.mark.parametrize("option", [["--last", "1"], ["--upto", "3"], ["--by", "epochs"]])
def test_options_of_a_folder_with_files_are_refused(run_folder, capsys, option):
    assert cli.main(["average", str(run_folder / "checkpoint1.pt"), *option, "-o", str(run_folder / "a.pt")]) == 2
    assert (
        f"{option[0]} chooses from a run folder, and {run_folder}/checkpoint1.pt is not one" in capsys.readouterr().err
    )
    assert not (run_folder / "a.pt").exists()


def test_average_into_a_missing_folder_is_told_before_the_work(run_folder, capsys, monkeypatch):
    monkeypatch.setattr(averaging, "average", lambda paths: pytest.fail("was averaged first"))
    assert cli.main(["average", str(run_folder), "--last", "2", "-o", str(run_folder / "none" / "a.pt")]) == 2
    assert "no folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [
        (["translate", "m", "--lenpen", "nan"], "--lenpen: nan was found and a number from -10 to 10 was expected"),
        (["translate", "m", "--lenpen", "400"], "--lenpen: 400 was found and a number from -10 to 10 was expected"),
        (
            ["fold", "m", "-o", "x", "--tolerance", "nan"],
            "--tolerance: nan was found and a number above 0 was expected",
        ),
        (["translate", "m", "--beam", "1.5"], "--beam: 1.5 was found and a whole number of at least 1 was expected"),
        (["translate", "m", "-x.de"], "unrecognized arguments: -x.de (of a file of that name, write ./ before it)"),
    ],
)
def test_what_the_parser_refuses_is_one_line(arguments, refusal, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(arguments)
    err = capsys.readouterr().err
    assert end.value.code == 2 and err.count("\n") == 1 and refusal in err


@pytest.mark.parametrize(
    "arguments",
    [
        "model.pt -x.de --beam 2",
        "--beam 2 model.pt -- -x.de",
        "model.pt --beam 2 -- -x.de",
        "--beam 2 -- model.pt -x.de",
    ],
)
def test_files_are_anywhere(arguments):
    """A file whose name begins with a hyphen is one after "--"; without it, ./ tells it from options."""
    given = arguments if "--" in arguments.split() else arguments.replace("-x.de", "./-x.de")
    args = cli.parse(["translate", *given.split()])
    assert (args.model.name, args.text.name, args.beam) == ("model.pt", "-x.de", 2)
    assert str(cli.parse(["translate", "m", "--beam", "2", "--", "-"]).text) == "-"


def test_packages_are_named_as_setup_has_them():
    """Can a missing package be installed as a message says, in the version that setup.py wants?"""
    wanted = (ROOT / "setup.py").read_text(encoding="utf-8")
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "fairseq_admin").rglob("*.py"))
    said = re.findall(r"'((?:ctranslate2|transformers|sacremoses)>=[^']+)'", sources)
    assert len(said) == 5 and all(f'"{requirement}"' in wanted for requirement in said), said
    assert "fairseq-admin[" not in sources


def test_help_answers_at_once():
    """Without what takes seconds to import; and the default of --last is the one that it states."""
    code = "import sys; from fairseq_admin import cli; cli.parsers(); print({'torch', 'fairseq'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
    help_text = " ".join(cli.parsers()[1]["average"].format_help().split())
    assert f"default: {averaging.LAST})" in help_text
