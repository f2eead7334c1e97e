"""What a user gets wrong: one line that says what was found, exit status 2, and nothing on disk changes.

The tables say what to run and what the line says. Options of a model are refused in test_schemes.py
and test_new_layers.py.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import os
import pickle
import shutil
import tempfile
import zipfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import new_layers
import pytest
import reference
import torch
from conftest import hydra_train, needs
from fairseq import options as fairseq_options
from fairseq.data import Dictionary
from test_export import state_of

import fairseq_admin.plugin  # noqa: F401  (registers the models)
from fairseq_admin import cli
from fairseq_admin.bar import Bar
from fairseq_admin.checkpoints.checkpoint import Checkpoint
from fairseq_admin.errors import AdminError
from fairseq_admin.method import provenance
from fairseq_admin.text.tokens import Text

State = dict[str, Any]
WEIGHT = "decoder.layers.1.fc2.weight"


def encode(**record: object) -> Callable[[State], object]:
    return lambda state: state["model"].update({provenance.KEY: provenance.encode(record)})


def options(**changed: object) -> Callable[[State], object]:
    return lambda state: state["cfg"]["model"].update(changed)


def weights(**changed: object) -> Callable[[State], object]:
    """Set weights, whose names have __ for dots."""
    return lambda state: state["model"].update({name.replace("__", "."): tensor for name, tensor in changed.items()})


def normalised_before(**more: object) -> dict[str, object]:
    return {"arch": "transformer", "encoder_normalize_before": True, "decoder_normalize_before": True, **more}


UNTIED = {"arch": "transformer", "share_all_embeddings": False}
MODELS: dict[str, dict[str, Any]] = {
    "stock.pt": {"arch": "transformer"},
    "pre-ln.pt": normalised_before(),
    "learned.pt": {"encoder_learned_pos": True},
    "embedding-norm.pt": {"layernorm_embedding": True},
    "narrow.pt": {**UNTIED, "encoder_embed_dim": 32},
    "output-dim.pt": {**UNTIED, "decoder_output_dim": 32},
    "adaptive.pt": {**UNTIED, "adaptive_softmax_cutoff": "20,40"},
    "no-positions.pt": {"arch": "transformer", "no_token_positional_embeddings": True},
    "two-heads.pt": {"decoder_attention_heads": 2},
    "tanh.pt": {"activation_fn": "tanh"},
    "no-cross.pt": {"arch": "transformer", "no_cross_attention": True},
    "cross-self.pt": {"cross_self_attention": True},
    "rezero.pt": {"admin_scheme": "rezero"},
    "keel.pt": {"admin_scheme": "keel"},
    "positionless.pt": {"max_target_positions": 1},
}
"""Models with these options, with random weights."""

STATES: dict[str, Callable[[State], object]] = {
    "other.pt": lambda state: state["model"]["decoder.layers.0.fc1.bias"].add_(1),
    "copy.pt": lambda state: state["optimizer_history"][-1].update(num_updates=8),
    "log.pt": encode(rule="log", seed=1),
    "seed.pt": encode(rule="reference", seed=2),
    "unprofiled.pt": lambda state: state["model"][provenance.KEY].zero_(),
    "garbled.pt": lambda state: state["model"][provenance.KEY].div_(2),
    "profile.pt": lambda state: state["model"]["encoder.layers.0.final_layer_norm.omega_init"].fill_(1.5),
    "folded.pt": lambda state: state.update(extra_state={"admin_fold": {"version": "0.1.0"}}),
    "missing.pt": lambda state: state["model"].pop(WEIGHT),
    "shape.pt": weights(decoder__layers__1__fc2__weight=torch.ones(64, 3)),
    "extra.pt": weights(decoder__adapter=torch.ones(3)),
    "layers.pt": options(decoder_layers=3),
    "activation.pt": options(activation_fn="sigmoidal"),
    "lightconv.pt": options(_name="lightconv"),
    "fconv.pt": options(_name="fconv"),
    "nan.pt": lambda state: state["model"][WEIGHT][0, 3:5].fill_(math.nan),
    "no-options.pt": lambda state: state.pop("cfg"),
    "near-zero.pt": lambda state: state["model"]["decoder.layers.1.final_layer_norm.omega_delta"][17:19].fill_(-1),
}
"""How the state of a checkpoint differs from that of model.pt."""


def cut(share: float) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])


def change_a_weight(path: Path) -> None:
    """torch.load does not notice it."""
    content = path.read_bytes()
    at = content.index(torch.load(path, weights_only=True)["model"][WEIGHT].numpy().tobytes())
    path.write_bytes(content[: at + 8] + bytes(4) + content[at + 12 :])
    assert torch.load(path, weights_only=True)["model"][WEIGHT].flatten()[2] == 0


def compress(path: Path) -> None:
    """A zip bomb: compressed zeros that would expand far beyond the file's size."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("c/data/0", bytes(10**6))


def overlap(path: Path) -> None:
    """A zip bomb: a hundred records share the same bytes, which would be read a hundred times."""
    with zipfile.ZipFile(path, "a") as archive:
        archive.filelist += [max(archive.filelist, key=lambda record: record.file_size)] * 100
        archive._didModify = True  # type: ignore[attr-defined]


class Evil:
    """Normal unpickling of this object creates a file, next to the checkpoint."""

    def __reduce__(self) -> Any:
        return open, ("touched", "w")


EVIL = {"model": {}, "extra": Evil()}
DAMAGES: dict[str, Callable[[Path], object]] = {
    "empty.pt": cut(0),
    "half.pt": cut(0.5),
    "cut.pt": cut(0.999),
    "bit.pt": change_a_weight,
    "compressed.pt": compress,
    "overlapping.pt": overlap,
    "text.pt": lambda path: path.write_text("2024-01-01 | INFO | loss 3.2\n" * 50),
    "tensor.pt": lambda path: torch.save(torch.ones(3), path),
    "list.pt": lambda path: torch.save([1], path),
    "weights.pt": lambda path: torch.save({"weights": {}}, path),
    "evil.pt": lambda path: torch.save(EVIL, path),
    "evil-old.pt": lambda path: torch.save(EVIL, path, _use_new_zipfile_serialization=False),
    "evil.pickle": lambda path: path.write_bytes(pickle.dumps(EVIL)),
}
"""How a file differs from model.pt."""

DATA: dict[str, Callable[[Path], object]] = {
    "cut-text": lambda data: cut(0.1)(data / "bin/valid.a-b.a.bin"),
    "empty-index": lambda data: cut(0)(data / "bin/valid.a-b.a.idx"),
    "other-dict": lambda data: reference.dictionary(44, 7).save(str(data / "bin/dict.b.txt")),
    "short-dict": lambda data: reference.dictionary(9).save(str(data / "bin/dict.b.txt")),
    "letters": lambda data: (data / "bin/dict.a.txt").write_text("w1\n"),
    "no-dict": lambda data: (data / "bin/dict.b.txt").unlink(),
    "no-settings": lambda data: (data / "text.json").unlink(),
    "no-bin": lambda data: shutil.rmtree(data / "bin"),
    "unknown-setting": lambda data: (data / "text.json").write_text('{"source": "a", "target": "b", "truecase": true}'),
    "number-setting": lambda data: (data / "text.json").write_text('{"source": "a", "target": "b", "escape": 1}'),
    "version-line": lambda data: (data / "codes").write_text("#version: 0.2\ne r</w>\n"),
    "empty-line": lambda data: (data / "codes").write_text("e r</w> 9\n\nt h 8\n"),
}
"""How a text's folder differs from data/."""

LOG = 'num. shared model params: 7\n{"epoch": 1, "update": 1, "nll_loss": "5", "num_updates": "9"}\n'
RUNS: dict[str, dict[str, str]] = {
    "no-losses": {"train.log": "no losses\n"},
    "two-logs": {"a.log": LOG, "b.log": ""},
    "cut-score": {"train.log": LOG, "score.json": "{"},
    "list-score": {"train.log": LOG, "score.json": "[]"},
    "no-stacks": {"train.log": LOG, "analysis/x.json": json.dumps({"what": "dependency"})},
    "text-model": {"train.log": LOG, "average.pt": "text"},
    "nothing": {"notes": ""},
}
"""Files of a run's folder."""


@pytest.fixture(scope="module")
def folder(corpus: Path) -> Iterator[Path]:
    """Working directory of the commands. Every user may read it, and write in out/."""
    folder = Path(tempfile.mkdtemp())
    for name in ("data", "run/checkpoints", "out", "full"):
        (folder / name).mkdir(parents=True)
    folder.chmod(0o755)
    (folder / "out").chmod(0o777)
    shutil.copytree(corpus, folder / "data/bin")
    Text("a", "b").write(folder / "data/text.json")
    for name, content in {
        "data/codes": "w 1 1\n", "text": "w1 w2\n", "full/notes": "x", "run/train.log": LOG, "run/fold.txt": "equal\n",
        "locked": "x",
    }.items():  # fmt: skip
        (folder / name).write_text(content)
    (folder / "locked").chmod(0o444)
    (folder / "out/link").symlink_to("../locked")
    for name in ("run/checkpoints/checkpoint1.pt", "run/checkpoints/checkpoint2.pt", "run/average.pt"):
        make(folder, "model.pt")
        shutil.copy(folder / "model.pt", folder / name)
    yield folder
    shutil.rmtree(folder)


def make(folder: Path, name: str) -> None:
    """Make a file or folder of the tables, if the name is one of them and it is not there."""
    path = folder / name
    words = Dictionary.load(str(folder / "data/bin/dict.a.txt"))
    if path.exists():
        return
    if name in MODELS or name in STATES or name == "model.pt":
        state = copy.deepcopy(state_of(words, words, **MODELS.get(name, {})))
        state["cfg"]["task"].update(source_lang="a", target_lang="b")
        if "arch" not in MODELS.get(name, {}) and "admin_scheme" not in MODELS.get(name, {}):
            encode(rule="reference", seed=1)(state)
        STATES.get(name, lambda state: None)(state)
        torch.save(state, path)
    elif name in DAMAGES:
        shutil.copy(folder / "model.pt", path)
        DAMAGES[name](path)
    elif name in DATA:
        shutil.copytree(folder / "data", path)
        DATA[name](path)
    elif name in RUNS:
        for file, content in RUNS[name].items():
            (path / file).parent.mkdir(parents=True, exist_ok=True)
            (path / file).write_text(content)
    elif name in ("deeper.pt", "deeper-mu.pt"):
        new = {"more_layers": 2, "more_scheme": "dt-fixup"}
        args = Namespace(arch="deeper_admin_tiny", task="sentence_prediction", criterion="any", **new)
        record = provenance.encode({"scheme": "dt-fixup", "mu": 2.5 if name == "deeper.pt" else 3.0})
        model = {**new_layers.build(new_layers.Task(), **new).state_dict(), f"more.{provenance.KEY}": record}
        Checkpoint({"args": args, "model": model}).write(path)


def contents(folder: Path) -> dict[Path, tuple[int, int] | None]:
    """Every path below a folder, with the size and time of a file."""
    paths = {path: path.lstat() for path in folder.rglob("*")}
    return {path: None if path.is_dir() else (stat.st_size, stat.st_mtime_ns) for path, stat in paths.items()}


def refusal(line: str, folder: Path, capsys: pytest.CaptureFixture, user: int | None = None) -> str:
    """The one line of a command that must be refused and change nothing. It writes out/new if `line` has no -o."""
    for word in line.replace("/", " ").split():
        make(folder, word)
    words = line.split()
    if words and words[0] != "omega" and "-o" not in words:
        words += ["-o", "out/new"]
    before, me, bars = contents(folder), os.geteuid(), {*Bar._instances}  # tqdm registers every bar of the process
    capsys.readouterr()
    try:
        os.seteuid(me if user is None else user)
        with contextlib.chdir(folder):
            status = cli.main(words)
    except SystemExit as end:  # from argparse
        status = end.code
    finally:
        os.seteuid(me)
    out, err = capsys.readouterr()
    assert status == 2 and out == "" and err.startswith("fairseq-admin") and err.count("\n") == 1, err
    assert contents(folder) == before
    assert {*Bar._instances} <= bars, "on a terminal the line would stand behind the bar"
    return err


FRESH = "--arch transformer_admin_tiny --random-tokens"
TRANSLATE = "translate model.pt text --device cpu --tokenised --data"
EXPORT = {engine: f"export {{}} --data data --to {engine}" for engine in ("huggingface", "ctranslate2")}
NO_FILE = "is missing, a folder, a pipe or a device; a fairseq checkpoint (.pt) was expected."
NO_CHECKPOINT = "is not a checkpoint; a file that torch.save wrote (.pt) was expected. Give a file that fairseq-train"
NOT_RUN = "open; a fairseq checkpoint was expected. Nothing in it was run"
INPUT = "would overwrite its input"
OTHER_RUN = "are not of one run: "

REFUSALS = [
    # The command line
    ("", "the following arguments are required: verb"),
    ("fold", "fairseq-admin fold: the following arguments are required: "),
    ("average run --last=0", "--last: expected a whole number of at least 1, found 0"),
    ("fold model.pt --tolerance nan", "--tolerance: expected a number above 0, found nan"),
    ("translate model.pt --lenpen nan", "--lenpen: expected a number from -10 to 10, found nan"),
    ("translate model.pt text --beam 2 --nbest 3", "--nbest 3 is more than --beam 2 finds"),
    (f"analyze dependency {FRESH} --encoder-layers x", "argument --encoder-layers"),
    ("analyze dependency model.pt --encoder-layers 2", "unrecognized arguments: --encoder-layers"),
    (f"analyze dependency {FRESH} --seed -1", "expected a whole number from 0 to"),
    (f"analyze dependency {FRESH} --depths 0,1", "expected whole numbers of at least 1, as 6,8,12, found 0,1"),
    # What is written
    *((f"{verb} model.pt -o x/", "--output: x/ is no file; expected a file to write, as x/NAME; see")
      for verb in ("average", "fold", "translate", "report", "analyze omega")),
    ("fold model.pt -o -", "--output: - is no file; expected a file to write, as ./NAME; see"),
    ("fold model.pt -o data", "is a folder or a device; a file to write was expected"),
    ("fold model.pt -o none/new", "could not be written (no folder "),
    ("analyze omega model.pt -o ..", "the name of the files to write was expected"),
    *((f"{line} -o out/link", "out/link is read-only; ")
      for line in ("average model.pt other.pt", "fold model.pt", f"{TRANSLATE} data", "report run")),
    ("average model.pt other.pt -o other.pt", f"{INPUT} other.pt; give another --output"),
    ("translate model.pt text -o model.pt", INPUT),
    (f"{TRANSLATE} data -o data/bin/dict.b.txt", INPUT),
    ("fold model.pt --data data/bin -o data/bin/valid.a-b.a.idx", INPUT),
    *((f"report run -o run/{name}", INPUT) for name in ("train.log", "average.pt", "fold.txt")),
    *((f"export model.pt --to ctranslate2 -o {name}", "exists; a new or empty folder") for name in ("full", "text")),
    ("export model.pt --to ctranslate2 -o none/new", "could not be written"),
    # Files that are not checkpoints, or damaged ones
    *((f"omega {name}", NO_FILE) for name in ("none.pt", "data", "/dev/null")),
    *((f"omega {name}", NO_CHECKPOINT) for name in ("empty.pt", "text.pt", "evil.pickle")),
    *((f"omega {name}", "not a whole checkpoint") for name in ("half.pt", "cut.pt")),
    ("omega bit.pt", "does not match its checksum"),
    *((f"omega {name}", "it is compressed, or its parts overlap") for name in ("compressed.pt", "overlapping.pt")),
    *((f"omega {name}", "has no entry 'model'") for name in ("tensor.pt", "weights.pt")),
    ("omega list.pt", "a torch file, but not a fairseq checkpoint"),
    *((f"omega {name}", NOT_RUN) for name in ("evil.pt", "evil-old.pt")),
    ("omega stock.pt", "stock.pt has no omega"),
    ("omega garbled.pt", "garbled.pt: admin_provenance holds no record"),
    ("fold missing.pt", f'missing.pt: Missing key(s) in state_dict: "{WEIGHT}"'),
    ("fold shape.pt", f"size mismatch for {WEIGHT}: "),
    ("fold extra.pt", "decoder.adapter"),
    ("fold layers.pt", "the checkpoint's decoder has 2 layers and the model's"),
    ("fold activation.pt", "no model can be built from its options (--activation-fn sigmoidal not supported)"),
    *((line, f"nan.pt: {WEIGHT} holds NaN or infinity, 2 of 8192 values: the run had diverged") for line in (
        "fold nan.pt", "average nan.pt other.pt", "export nan.pt --to ctranslate2",
        "translate nan.pt text --tokenised --device cpu --data data",
    )),
    # Averages
    ("average run --last 3", "holds 2 checkpoints numbered by epochs and the last 3 were asked for. Lower --last"),
    ("average run --by updates", "no numbered checkpoint; expected names like checkpoint_3_900.pt (updates)"),
    ("average data", "no numbered checkpoint; expected names like checkpoint7.pt (epochs) or checkpoint_3_900.pt (up"),
    ("average run data", "is a folder; either one run folder or files were expected"),
    ("average model.pt data", "is a folder; either one run folder or files were expected"),
    ("average model.pt --last 1", "choose from a run folder, and model.pt is not one"),
    ("average model.pt --by epochs", "choose from a run folder, and model.pt is not one"),
    ("average model.pt other.pt --data none", "--data none: no such folder"),
    ("average model.pt missing.pt", f"{OTHER_RUN}the shape of {WEIGHT} is (64, 128) in the first and missing in"),
    ("average missing.pt model.pt", f"{OTHER_RUN}the shape of {WEIGHT} is missing in the first and (64, 128) in"),
    ("average model.pt shape.pt", f"{OTHER_RUN}the shape of {WEIGHT} is (64, 128) in the first and (64, 3) in"),
    ("average model.pt stock.pt", f"{OTHER_RUN}the shape of "),
    ("average model.pt log.pt", f"{OTHER_RUN}omega's rule is reference in the first and log in the second"),
    ("average model.pt other.pt seed.pt", f"{OTHER_RUN}omega's seed is 1 in the first and 2 in the second."),
    ("average unprofiled.pt model.pt", f"{OTHER_RUN}omega's rule is missing in the first and reference in the second"),
    ("average model.pt profile.pt", "omega of encoder.layers.0.final_layer_norm is 1 in the first and 1.5 in the"),
    ("average deeper.pt deeper-mu.pt", f"{OTHER_RUN}the new layers' mu is 2.5 in the first and 3.0 in the second"),
    ("average model.pt garbled.pt", "garbled.pt: admin_provenance holds no record"),
    ("average folded.pt model.pt", "folded.pt is folded, and the fold is not linear in omega: average first"),
    ("average model.pt other.pt copy.pt", "copy.pt and model.pt hold the same weights; each checkpoint counts once"),
    # Models that a verb does not take
    ("fold stock.pt", "has no omega: "),
    ("fold no-options.pt", "has neither 'cfg' nor 'args'"),
    ("fold cross-self.pt", "--cross-self-attention"),
    ("fold rezero.pt", "of --admin-scheme rezero, whose layers no stock Transformer has"),
    ("fold keel.pt", "of --admin-scheme keel, whose layers no stock Transformer has"),
    ("fold near-zero.pt", "omega of decoder.layers.1.final_layer_norm is 0 at channel 17; folding divides by it"),
    ("fold near-zero.pt", "--min-omega 1e-06"),
    ("fold model.pt --tolerance 1e-12", "folded is not the same: log-probabilities of"),
    ("export model.pt --to huggingface --quantization int8", "--quantization is for --to ctranslate2"),
    ("export model.pt --data data --to ctranslate2 --quantization int7", "int7"),
    ("export fconv.pt --to ctranslate2", "architecture is fconv"),
    *((EXPORT["huggingface"].format(name), message) for name, message in (
        ("pre-ln.pt", "--to ctranslate2"), ("learned.pt", "--encoder-learned-pos"),
        ("embedding-norm.pt", "--layernorm-embedding"), ("narrow.pt", "--encoder-embed-dim"),
        ("output-dim.pt", "--decoder-output-dim"), ("adaptive.pt", "--adaptive-softmax-cutoff"),
        ("no-positions.pt", "does not compute"),
    )),
    *((EXPORT["ctranslate2"].format(name), message) for name, message in (
        ("two-heads.pt", "decoder-attention-heads must have the same value"),
        ("tanh.pt", "--activation-fn tanh is not supported"), ("no-cross.pt", "cannot take this model"),
        ("no-positions.pt", "no-token-pos"),
    )),
    ("translate deeper.pt text", "was trained for the task 'sentence_prediction'; expected 'translation'"),
    ("fold deeper.pt", "is of deeper_admin; only transformer_admin and transformer_lm_admin can be"),
    ("export deeper.pt --to ctranslate2", "its architecture is deeper_admin_tiny"),
    ("analyze omega deeper.pt", "is a deeper_admin_tiny; a checkpoint of a model of"),
    # Texts
    ("fold model.pt --data cut-text/bin", "cut-text/bin: no data "),
    ("fold model.pt --data empty-index/bin", "empty-index/bin: no data "),
    ("fold model.pt --data letters/bin", "letters/bin: no data "),
    ("fold model.pt --data no-bin", " Give the folder fairseq-preprocess wrote.\n"),
    (f"{TRANSLATE} short-dict", "dict.b.txt: the dictionary has 13 symbols and the model 48. Give"),
    (f"{TRANSLATE} letters", "dict.a.txt is not a dictionary of fairseq's "),
    (f"{TRANSLATE} other-dict", "model.pt: no model can be built"),  # fairseq ties embeddings of one dictionary alone
    (f"{TRANSLATE} no-dict", "no-dict/bin. Give the folder of the model's training text, where dict.b.txt is"),
    ("translate model.pt text --data no-settings", "there is no text.json in "),
    (f"{TRANSLATE} unknown-setting", "unexpected keyword argument 'truecase'"),
    (f"{TRANSLATE} number-setting", "'escape' is 1; expected true or false"),
    (f"{TRANSLATE} version-line", "line 1 is not a merge; expected "),
    (f"{TRANSLATE} empty-line", "line 2 is not a merge; expected "),
    (f"{TRANSLATE} data --codes none", "none: cannot be read (No such file or directory)"),
    ("translate model.pt none.txt --data data", "none.txt: cannot be read (No such file or directory)"),
    ("translate model.pt text", "there is no dict.a.txt in "),
    ("translate data text", "has neither model.pt nor model.bin"),
    ("translate positionless.pt text --tokenised --device cpu --data data", "has 1 positions; 2 are needed"),
    # Measurements and reports
    ("analyze dependency", "either a CHECKPOINT or --arch was expected, but neither was given"),
    ("analyze dependency model.pt --arch transformer_admin_6l", "both were given"),
    ("analyze dependency model.pt", "no sentences to measure on. Give --data"),
    ("analyze dependency model.pt other.pt --data data", "measures one checkpoint, but 2 were"),
    ("analyze updates model.pt --data data", "Give two or more checkpoints of a run"),
    ("analyze updates model.pt copy.pt --data data", "has the same weights as"),
    ("analyze updates model.pt stock.pt --data data", "not of one run: the shape of"),
    ("analyze updates model.pt seed.pt --data data", "not of one run: omega's seed is 1 in the first and 2 in"),
    ("analyze omega stock.pt", "stock.pt has no omega"),
    ("analyze omega unprofiled.pt", "its omega has not been profiled yet"),
    ("analyze dependency lightconv.pt --random-tokens", "a checkpoint of a model of transformer_lm, "),
    ("analyze dependency --arch lightconv --random-tokens", "expected an architecture of"),
    # The output of ResiDual's last sub-layer is Post-LN's alone.
    (f"analyze output-change {FRESH} --admin-scheme residual", "the output of ResiDual's stack is a sum of two"),
    ("analyze dependency --arch transformer_admin_6l --data none", "no data for --arch"),
    ("analyze dependency model.pt --data data --split dev", "no data to check on"),
    ("analyze dependency model.pt --data data --tokens 9999", "Give --tokens "),
    (f"analyze dependency {FRESH} --encoder-ffn-embed-dim -1", "no model can be built"),
    ("report none", "none is not a folder; a run's was expected"),
    ("report text", "text is not a folder"),
    ("report run run/.", "was given more than once; each run counts once"),
    ("report nothing", "has neither a checkpoint (.pt) nor a log of fairseq-train (train.log)"),
    ("report no-losses", "train.log holds no losses"),
    ("report two-logs", "several logs (a.log, b.log)"),
    ("report cut-score", "score.json: cannot be read"),
    ("report list-score", "found a list, expected a JSON object"),
    ("report no-stacks", "holds dependency that cannot be shown (KeyError: 'stacks')"),
    ("report text-model", "is not a checkpoint"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "message"), REFUSALS, ids=[line or "no verb" for line, _ in REFUSALS])
def test_is_refused(line: str, message: str, folder: Path, capsys: pytest.CaptureFixture) -> None:
    for engine in ("ctranslate2", "huggingface"):
        if line.startswith("export") and engine in line:
            needs(engine)
    assert message in refusal(line, folder, capsys)
    assert not (folder / "touched").exists()


@pytest.mark.parametrize(
    ("line", "file"),
    [
        ("omega other.pt", "other.pt"),
        (f"{TRANSLATE} data", "data/bin/dict.a.txt"),
        ("average model.pt other.pt --data data", "data/codes"),
        ("average run --last 1", "run/checkpoints"),
        ("report run", "run/average.pt"),
    ],
)
def test_a_file_without_read_permission_is_not_called_damaged(
    line: str, file: str, folder: Path, capsys: pytest.CaptureFixture
) -> None:
    make(folder, "other.pt")
    mode, root = (folder / file).stat().st_mode, os.geteuid() == 0
    try:
        # Root could read everything, so another user asks. Imports, which another user could not do, are done.
        (folder / file).chmod(mode & 0o700 if root else 0)
        message = refusal(line, folder, capsys, 65534 if root else None)
    finally:
        (folder / file).chmod(mode)
    assert f"{file}: cannot be read (Permission denied)." in message


# fairseq's own commands -----------------------------------------------------------------------------------------------

SHARDED = ["transformer_admin", "transformer_lm_admin", "masked_lm_admin", "deeper_admin"]


@pytest.mark.parametrize("arch", [*SHARDED, *(f"{name}_tiny" for name in SHARDED)])
def test_fully_sharded_is_refused_before_data_is_read(arch: str) -> None:
    task = "translation" if arch.startswith("transformer_admin") else "language_modeling"
    arguments = ["data", "--task", task, "--arch", arch, "--ddp-backend"]
    parser = fairseq_options.get_training_parser()
    with pytest.raises(AdminError, match="^--ddp-backend fully_sharded was given.* Leave it out"):
        fairseq_options.parse_args_and_arch(parser, [*arguments, "fully_sharded"])
    fairseq_options.parse_args_and_arch(fairseq_options.get_training_parser(), [*arguments, "legacy_ddp"])


def test_hydra_refuses_options_with_the_same_line(corpus: Path, tmp_path: Path) -> None:
    """fairseq-hydra-train gives the same error, although hydra catches every error and formats it itself."""
    run = hydra_train(corpus, tmp_path, "_name: transformer_admin_tiny, admin_profile_tokens: 0")
    assert run.status != 0 and "--admin-profile-tokens is 0" in run.output, run.output[-3000:]
    assert not list(tmp_path.glob("*.pt"))
