"""Try attach and fold on every model of the installed transformers library.

Every model class is built small, with random weights and a random batch, in float64 if the class can compute in it.
Models in which a norm alone reads a sum x + f(x) are Post-LN. For each of these, a row says how many sub-layers have an
ω. The row also says whether all outputs are the same bit for bit at ω = 1 and the same up to rounding once folded, or
why the model cannot be folded.

    python -m recipes.research.bench.families --csv docs/rows/families.csv     # all, more than half an hour
    python -m recipes.research.bench.families bert bart xlnet

This also tries encoders of other libraries. Make an environment that has these libraries, and name them:

    python -m recipes.research.bench.families recbole x-transformers joeynmt espnet --csv docs/rows/libraries.csv
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import math
import random
import re
import resource
import signal
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

import fairseq_admin.pytorch as admin
from fairseq_admin.errors import AdminError
from fairseq_admin.pytorch.attaching import attached
from fairseq_admin.pytorch.trace import tensors
from recipes.steps.results import write_runs

SECONDS, MEMORY = 100, 2**33
"""Seconds of CPU time and bytes of memory that one family may take."""
LENGTH = 12
EXACT = {torch.float64: 1e-11, torch.float32: 1e-4}
SETTINGS: dict[str, dict[str, Any]] = {
    "align": {
        "projection_dim": 80,
        "vision_config.image_size": 64,
        "vision_config.width_coefficient": 0.25,
        "vision_config.depth_coefficient": 0.2,
    },
    "autoformer": {"prediction_length": 4, "num_time_features": 2, "label_length": 2},
    "blip-2": {"image_token_id": 3, "num_query_tokens": 4},
    "informer": {"prediction_length": 4, "num_time_features": 2},
    "opt": {"do_layer_norm_before": False},
    "time_series_transformer": {"prediction_length": 4, "num_time_features": 2},
    "tvp": {"num_frames": 2, "max_img_size": 64, "visual_prompt_size": 8},
    "xmod": {"default_language": "en_XX"},
}
"""More settings for the small configuration of a model type."""
CLASSES = {"trocr": "TrOCRForCausalLM"}
"""Classes of model types for which transformers registers no base model."""
WIDTHS = re.compile("(encoder_|decoder_)?(hidden_size|d_model|dim|emb_dim|n_embd|embedding_size|embed_dim)")
INNER = re.compile("(encoder_|decoder_)?(intermediate_size|ffn_dim|d_inner|hidden_dim|d_ff)")
HEADS = re.compile(".*(_heads|n_head)|num_heads")
LAYERS = re.compile("(?!num_feat_extract).*layers|n_layer|depth")


def small(config: Any, narrow: bool) -> Any:
    """Give a configuration two layers everywhere and a small vocabulary; if `narrow`, small widths, too."""
    for key, value in list(vars(config).items()):
        if isinstance(value, transformers.PretrainedConfig):
            small(value, narrow)
        elif isinstance(value, int) and not isinstance(value, bool):
            sizes = {LAYERS: 2, **({WIDTHS: 64, INNER: 96, HEADS: 4} if narrow else {})}
            setattr(config, key, next((min(value, size) for law, size in sizes.items() if law.fullmatch(key)), value))
    config.vocab_size = 99
    for key in ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"):
        if getattr(config, key, None) is None or getattr(config, key) >= 99:
            setattr(config, key, 1)
    return config


def batch_for(model: Any) -> dict[str, Any]:
    """A random batch of two examples: the keyword arguments of the model's forward."""
    config, names = model.config, inspect.signature(model.forward).parameters
    ids = torch.randint(5, 90, (2, LENGTH))
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", 64) or 64
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    known: dict[str, Any] = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "decoder_input_ids": ids.clone(),
        "bbox": torch.zeros(2, LENGTH, 4, dtype=torch.long),
        "pixel_values": torch.randn(2, getattr(vision, "num_channels", 3), height, width),
        "input_values": torch.randn(2, 8000),
        "input_features": torch.randn(2, 64, getattr(config, "num_mel_bins", 80)),
        "visual_feats": torch.randn(2, 5, getattr(config, "visual_feat_dim", 2048)),
        "visual_pos": torch.randn(2, 5, 4),
    }
    if hasattr(config, "lags_sequence"):
        past, future = config.context_length + max(config.lags_sequence), config.prediction_length
        known |= {"past_values": torch.randn(2, past), "past_observed_mask": torch.ones(2, past)}
        known["future_values"] = torch.randn(2, future)
        known |= {"past_time_features": torch.randn(2, past, 2), "future_time_features": torch.randn(2, future, 2)}
    width = getattr(config, "hidden_size", 64)
    special: dict[str, dict[str, Tensor]] = {
        "blip-2": {"input_ids": torch.cat([torch.full((2, 4), 3), ids], 1), "attention_mask": torch.ones(2, 16).long()},
        "blip_2_qformer": {
            "query_embeds": torch.randn(2, 4, width),
            "encoder_hidden_states": torch.randn(2, LENGTH, getattr(config, "encoder_hidden_size", 0)),
        },
        "clap": {"input_features": torch.randn(2, 1, 1001, 64)},
        "speecht5": {name: torch.randn(2, LENGTH, width) for name in ("input_values", "decoder_input_values")},
        # TVP computes the positions of columns for a batch of one only.
        "tvp": {
            "pixel_values": torch.randn(1, 2, 3, 64, 64),
            "input_ids": ids[:1],
            "attention_mask": torch.ones(1, LENGTH),
        },
    }
    known |= special.get(config.model_type, {})
    text = "input_ids" in names
    if "bbox" in names:  # a model of pages: give it the words, not the image
        del known["pixel_values"]
    return {name: value for name, value in known.items() if name in names and (text or name != "attention_mask")}


def library(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """An encoder of three Post-LN layers of another library, and a batch."""
    x, mask = torch.randn(2, LENGTH, 64), torch.ones(2, 1, LENGTH, dtype=torch.bool)
    if name == "recbole":
        layers = importlib.import_module("recbole.model.layers")
        inputs = {"hidden_states": x, "attention_mask": torch.zeros(2, 1, 1, LENGTH)}
        return layers.TransformerEncoder(3, 4, 64), {**inputs, "output_all_encoded_layers": False}
    if name == "x-transformers":
        return importlib.import_module("x_transformers").Encoder(dim=64, depth=3, heads=4, pre_norm=False), {"x": x}
    if name == "joeynmt":
        encoders = importlib.import_module("joeynmt.encoders")
        model = encoders.TransformerEncoder(64, 96, 3, 4, layer_norm="post")
        return model, {"src_embed": x, "src_length": torch.full((2,), LENGTH), "mask": mask}
    assert name == "espnet", name
    encoder = importlib.import_module("espnet.nets.pytorch_backend.transformer.encoder")
    model = encoder.Encoder(64, 64, linear_units=96, num_blocks=3, input_layer="linear", normalize_before=False)
    return model, {"xs": x, "masks": mask}


LIBRARIES = ("recbole", "x-transformers", "joeynmt", "espnet")


def result_of(model: nn.Module, batch: dict[str, Any]) -> list[Tensor]:
    """All floating-point outputs of the model, from a fixed random state."""
    torch.manual_seed(1)
    with torch.no_grad():
        return [tensor for tensor in tensors(model(**batch)) if tensor.is_floating_point()]


def apart_by(before: Tensor, after: Tensor) -> float:
    """The largest difference between two outputs; infinite if their shapes differ (VITS samples how long it speaks)."""
    return (before - after).abs().max().item() if before.shape == after.shape else math.inf


def family(name: str, narrow: bool) -> tuple[nn.Module, dict[str, Any]]:
    """A small model of transformers, and a batch."""
    classes = CLASSES.get(name) or MODEL_MAPPING_NAMES[name]
    model_class = getattr(transformers, classes if isinstance(classes, str) else classes[0])
    settings = SETTINGS.get(name, {})
    config = small(CONFIG_MAPPING[name](**{key: value for key, value in settings.items() if "." not in key}), narrow)
    for key, value in settings.items():
        part, dot, last = key.partition(".")
        if dot:
            setattr(getattr(config, part), last, value)
    model = model_class(config)
    return model, batch_for(model)


def tried(name: str, narrow: bool, dtype: torch.dtype) -> dict[str, Any]:
    """One family's row."""
    torch.manual_seed(1)
    random.seed(1)
    model, batch = library(name) if name in LIBRARIES else family(name, narrow)
    model.to(dtype).eval()
    row: dict[str, Any] = {"model": name, "class": type(model).__name__, "sublayers": 0, "verdict": "", "reason": ""}
    floats = {key: v.to(dtype) for key, v in batch.items() if isinstance(v, Tensor) and v.is_floating_point()}
    batch |= floats
    before = result_of(model, batch)
    kept = ""
    try:
        admin.attach(model, batch, omega=1)
    except AdminError as error:
        kept = re.split(r"\. unfoldable=| \(modeling_", str(error).partition(": ")[2])[0]
        try:
            admin.attach(model, batch, omega=1, unfoldable="keep")
        except AdminError as error:
            return {**row, "verdict": "not Post-LN" if "no sum" in str(error) else "refused", "reason": kept}
    row["sublayers"] = sum(attached(model)[1].stacks.values())
    same = all(map(torch.equal, before, result_of(model, batch)))
    drawn: dict[int, float] = {}  # branches that share weights share their omega
    for branch in attached(model)[1].branches:
        value = next(
            (drawn[id(w.parameter)] for w in branch.weights if id(w.parameter) in drawn), 1 + 2 * random.random()
        )
        drawn |= dict.fromkeys([id(weight.parameter) for weight in branch.weights], value)
        branch.holder.admin_omega.fill_(value)
    divided = result_of(model, batch)
    moved = max(apart_by(a, b) for a, b in zip(before, divided))
    if kept:
        return {**row, "verdict": "kept" if same and moved > 1e-3 else "WRONG", "reason": kept}
    admin.fold(model)
    pairs = zip(divided, result_of(model, batch))
    apart = [apart_by(a, b) / max(1.0, a.abs().max().item()) for a, b in pairs]
    right = same and moved > 1e-3 and max(apart) <= EXACT[dtype]
    reason = f"{max(apart):.1e}" if same else "not the same at omega = 1"
    return {**row, "verdict": "exact" if right else "WRONG", "reason": reason}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*", help="names of transformers' model types (default: all)")
    parser.add_argument("--csv", type=Path, help="file to write")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")

    def late(*_: Any) -> None:
        raise TimeoutError(f"more than {SECONDS} s")

    signal.signal(signal.SIGPROF, late)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    rows = []
    for name in args.models or sorted(MODEL_MAPPING_NAMES):
        row: dict[str, Any] = {}
        for narrow, dtype in ((True, torch.float64), (False, torch.float64), (False, torch.float32)):
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            try:
                row = tried(name, narrow, dtype)
            except Exception as error:
                text = (str(error) or type(error).__name__).splitlines()[0]
                row = {"model": name, "class": "", "sublayers": 0, "verdict": "not run", "reason": text[:150]}
            signal.setitimer(signal.ITIMER_PROF, 0)
            if row["verdict"] not in ("not run", "WRONG") or "more than" in row["reason"]:
                break
        rows.append(row)
        print(*row.values(), sep="\t", flush=True)
    if args.csv:
        write_runs(args.csv, [row for row in rows if row["verdict"] not in ("not Post-LN", "not run")])


if __name__ == "__main__":
    main()
