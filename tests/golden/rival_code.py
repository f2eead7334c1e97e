"""Make the golden numbers of other schemes by running their authors' own code. From the folder tests:

    git clone https://github.com/REPOSITORY CHECKOUT && git -C CHECKOUT checkout COMMIT
    python -m golden.rival_code SCHEME CHECKOUT

SOURCES lists the repository and commit. This repository contains none of that code. rivals/SCHEME.json holds the
repository, the commit, the versions used, and the numbers that rivals.py describes.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy
import torch
from golden import clinic
from golden.rivals import LARGEST_NORM, QKV, SIDES, SIZES, Drawn, gradients, laws, logits, named, rounded, table


def of_models(build: Callable[[], Any]) -> dict[str, Any]:
    model = build()
    return {
        "laws": laws(lambda seed: named(build())),
        "logits": rounded(logits(model)),
        "gradients": gradients(model.eval()),
    }


def languages() -> Any:
    """A stand-in for a task: the dictionaries that fairseq (whichever is imported) builds a model from."""
    from fairseq.data import Dictionary

    words = Dictionary()
    for word in range(clinic.WORDS):
        words.add_symbol(f"w{word}")
    return SimpleNamespace(source_dictionary=words, target_dictionary=words)


def fork(*options: str) -> Callable[[Path], dict[str, Any]]:
    """T-Fixup and B2T: a fork of fairseq whose `transformer` has extra options."""

    def run(checkout: Path) -> dict[str, Any]:
        numpy.float = float  # type: ignore[attr-defined]  # removed from numpy
        from fairseq import options as parsers
        from fairseq.models import ARCH_MODEL_REGISTRY

        sizes = [f"--{option.replace('_', '-')}={size}" for option, size in SIZES.items()]
        arguments = ["DATA", "--arch=transformer", "--share-all-embeddings", "--dropout=0", *sizes, *options]
        args = parsers.parse_args_and_arch(parsers.get_training_parser(), arguments)
        return of_models(lambda: ARCH_MODEL_REGISTRY["transformer"].build_model(args, languages()))

    return run


def residual(checkout: Path) -> dict[str, Any]:
    """ResiDual: a fairseq plugin."""
    import resi_dual  # noqa: F401  (registers the model)
    from fairseq.models import ARCH_MODEL_REGISTRY
    from fairseq.models.transformer import TransformerConfig

    widths = {f"decoder_{end}_dim": SIZES["decoder_embed_dim"] for end in ("input", "output")}
    args = SimpleNamespace(share_all_embeddings=True, dropout=0.0, attention_dropout=0.0, **SIZES, **widths)
    cfg = TransformerConfig.from_namespace(args)
    for name in ("enc_alpha", "dec_alpha", "enc_res_input_norm_scale", "dec_res_input_norm_scale"):
        setattr(cfg, name, 1.0)  # as in their configurations for IWSLT and WMT
    return of_models(lambda: ARCH_MODEL_REGISTRY["resi_dual"].build_model(cfg, languages()))


def zero(checkout: Path) -> dict[str, Any]:
    """DS-Init: their `transformer` with deep_transformer_init. It needs TensorFlow 1; tensorflow 2.15 includes it."""
    import tensorflow.compat.v1 as tf

    tf.disable_v2_behavior()
    sys.modules["tensorflow"] = tf
    from models import transformer
    from modules import initializer

    words = SimpleNamespace(size=lambda: clinic.WORDS, pad=lambda: 0)
    shared = {f"shared_{pair}_embedding": True for pair in ("source_target", "target_softmax")}
    off = {f"{kind}dropout": 0.0 for kind in ("", "attention_", "residual_", "relu_")}
    sizes = {"hidden_size": 32, "embed_size": 32, "filter_size": 64, "num_heads": 4, "label_smooth": 0.1}
    depths = {f"num_{side}_layer": SIZES[f"{side}_layers"] for side in SIDES}
    both = {**shared, **off, **sizes, **depths, "src_vocab": words, "tgt_vocab": words}
    # The initialiser and its gain are those of their README's command.
    params = SimpleNamespace(deep_transformer_init=True, initializer_gain=1.0, scope_name="zero", **both)
    modules = {"self_attention": "self_attn.", "cross_attention": "encoder_attn.", "feed_forward": ""}
    places = {"q_map": "q_proj", "k_map": "k_proj", "v_map": "v_proj", "o_map": "out_proj"}
    places.update(enlarge="fc1", output="fc2")

    def draw(seed: int) -> Drawn:
        with tf.Graph().as_default(), tf.Session() as session:
            tf.set_random_seed(seed)
            tokens = tf.ones([2, 5], tf.int32)
            start = initializer.get_initializer("uniform_unit_scaling", params.initializer_gain)
            transformer.train_fn({"source": tokens, "target": tokens}, params, initializer=start)
            session.run(tf.global_variables_initializer())
            values = session.run({variable.name: variable for variable in tf.trainable_variables()})
        found = {}
        for name, value in values.items():
            parts = name.split("/")  # zero/encoder/layer_0/self_attention/dot_attention/qkv_map/W_0_0:0
            if len(parts) != 7:
                continue
            layer = f"{parts[1]}.layers.{parts[2].partition('_')[2]}.{modules[parts[3]]}"
            stacked = parts[5] == "qkv_map"
            for place, part in zip(QKV if stacked else [places[parts[5]]], numpy.split(value.T, 3 if stacked else 1)):
                found[f"{layer}{place}.{'weight' if parts[6].startswith('W') else 'bias'}"] = part
        return found

    return {"laws": laws(draw), "tensorflow": version("tensorflow-cpu")}


def fixup(checkout: Path) -> dict[str, Any]:
    """Fixup: their layers alone, in today's fairseq. They were written for a fairseq of 2018 that we do not have."""
    import fairseq.models
    import fairseq.modules

    def load(name: str) -> Any:
        path = checkout.joinpath("fairseq", *name.split(".")).with_suffix(".py")
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    fairseq.modules.MultiheadAttentionZero = load("fairseq.modules.multihead_attention_zero").MultiheadAttentionZero
    theirs = load("fairseq.models.transformer_zero")
    args = SimpleNamespace(dropout=0.0, attention_dropout=0.0, relu_dropout=0.0, **SIZES)
    args.encoder_normalize_before = args.decoder_normalize_before = False

    def draw(seed: int) -> Drawn:
        layers = theirs.TransformerZeroEncoderLayer, theirs.TransformerZeroDecoderLayer
        found = {}
        for side, layer in zip(SIDES, layers):
            for i in range(SIZES[f"{side}_layers"]):
                found.update(named(layer(args), f"{side}.layers.{i}"))
        return {name: value for name, value in found.items() if value.ndim == 2}

    return {"laws": laws(draw)}


def dt_fixup(checkout: Path) -> dict[str, Any]:
    """DT-Fixup: their optimizer's two steps on a stack of their layers, without the relations between words."""
    from semparser.model.transformer import EncoderLayer
    from semparser.nn import nn_utils
    from semparser.nn.optimizers import BOTOptimizer

    count = SIZES["encoder_layers"]
    places = {"tokeys": "k_proj", "toqueries": "q_proj", "tovalues": "v_proj", "unifyheads": "out_proj"}

    def draw(seed: int) -> Drawn:
        layers = torch.nn.ModuleList(EncoderLayer(32, heads=4, ff_hidden_mult=2, use_lnorm=False) for _ in range(count))
        parameters = [(f"transformer.encoder.layers.{name}", p) for name, p in layers.named_parameters()]
        optimizer = BOTOptimizer(num_layers_rat=count)
        optimizer.model = SimpleNamespace(named_parameters=lambda: parameters)
        nn_utils.glorot_init([p for _, p in parameters])
        optimizer.dt_fixup(LARGEST_NORM)
        found = named(layers, "encoder.layers")
        for theirs, ours in {**places, "ff.0": "fc1", "ff.2": "fc2"}.items():
            module = f"self_attn.{ours}" if theirs in places else ours
            old = f"attention.{theirs}" if theirs in places else theirs
            found = {name.replace(f".{old}.", f".{module}."): value for name, value in found.items()}
        return {name: value for name, value in found.items() if value.ndim == 2 and "relation" not in name}

    return {"laws": laws(draw)}


def torchscale(checkout: Path) -> dict[str, Any]:
    """DeepNorm: the constant on the shortcut, and the ratio of its weights to the same weights drawn without it."""
    missing = {"fairscale.nn": ("checkpoint_wrapper", "wrap"), "timm.models.layers": ("drop_path",)}
    for name, functions in {**missing, "einops": ("rearrange",)}.items():  # imported by their code, not called here
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            sys.modules.setdefault(".".join(parts[:end]), ModuleType(name))
        vars(sys.modules[name]).update(dict.fromkeys(functions))
    from torchscale.architecture import config, decoder, encoder

    stacks = {"encoder": (encoder.Encoder, config.EncoderConfig), "decoder": (decoder.Decoder, config.DecoderConfig)}
    scales = {}
    for side, (stack, alone) in stacks.items():
        for settings in (alone, config.EncoderDecoderConfig):
            whole = settings is not alone
            built = []
            for deepnorm in (True, False):
                torch.manual_seed(0)
                cfg = settings(vocab_size=clinic.WORDS, subln=False, deepnorm=deepnorm, **SIZES)
                cfg.encoder_normalize_before = cfg.decoder_normalize_before = False
                built.append(stack(cfg, is_encoder_decoder=whole))
            scaled, plain = (named(it.layers, "layers") for it in built)
            gains: dict[float, set[str]] = {}
            for name, value in scaled.items():
                if value.ndim == 2:
                    gains.setdefault(float(f"{(value / plain[name]).mean():.5g}"), set()).add(name.split(".")[-2])
            by_gain = {gain: sorted(kinds) for gain, kinds in gains.items()}
            scales[f"{side}{', with the other stack' * whole}"] = [built[0].layers[0].alpha, by_gain]
    return {"scales": scales}


class Source(NamedTuple):
    """A scheme's code: where it is, and which part of it to run."""

    repository: str
    commit: str
    run: Callable[[Path], dict[str, Any]]
    folder: str = ""
    """The folder that its imports start from."""


T_FIXUP, B2T = fork("--Tfixup", "--dont-use-layernorm"), fork("--residual-bottom-to-top")
SOURCES = {
    "ds-init-code": Source("bzhangGo/zero", "d97e2c21b1c6d0467fe821223042247bf2b46bf9", zero),
    "t-fixup-code": Source("layer6ai-labs/T-Fixup", "b17e166d9f60671a92c3f39e24c9b8c93995e5a3", T_FIXUP),
    "b2t-code": Source("takase/b2t_connection", "c8e2ad4ed0b137bf267272419dbf71771dff9f64", B2T),
    "fixup": Source("hongyi-zhang/Fixup", "f3fa449fbb8906ccb7143cea822f8b964b3d9258", fixup),
    "dt-fixup": Source("BorealisAI/DT-Fixup", "43e73397b79913001d03823fa7e04803445c1a02", dt_fixup, "spider"),
    "deepnorm": Source("microsoft/torchscale", "4d1e0e82e5adf86dd424f1463192635b73fc8efc", torchscale),
    "residual": Source("microsoft/ResiDual", "8682f7510be105a0caf5b98a021e712f44f90ace", residual),
}


def main(scheme: str, checkout: Path) -> None:
    source = SOURCES[scheme]
    clinic.verify(checkout, source.commit)
    sys.path.insert(0, str(checkout / source.folder))
    os.chdir(tempfile.mkdtemp())  # their code may write files here
    made = {
        "repository": f"https://github.com/{source.repository}",
        "commit": source.commit,
        "command": f"python -m golden.rival_code {scheme} {checkout.name}",
        "torch": torch.__version__,
        **source.run(checkout),
    }
    lines = [f' "{key}": {json.dumps(value)}' for key, value in made.items() if not isinstance(value, dict)]
    for key, value in made.items():
        if isinstance(value, dict):
            rows = ",\n".join(f'  "{name}": {json.dumps(row)}' for name, row in value.items())
            lines.append(f' "{key}": {{\n{rows}\n }}')
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    table(scheme).parent.mkdir(exist_ok=True)
    table(scheme).write_text(text)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]).resolve())
