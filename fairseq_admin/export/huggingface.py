"""Export a folder for Hugging Face's transformers, as FSMT: fairseq's Post-LN Transformer.

B sentences   T units of a sentence   V vocabulary
"""

from __future__ import annotations

import shutil
from argparse import Namespace
from pathlib import Path

import torch
from fairseq.utils import convert_padding_direction

from .. import outputs
from ..checkpoints.building import build
from ..checkpoints.equivalence import EOS, PAD, log_probabilities
from ..errors import AdminError
from ..packages import need
from . import tokenizer
from .exportable import Exportable, batches, refuse_unlike

ACTIVATIONS = {"gelu_accurate": "gelu_new", "gelu_fast": "gelu_new", "relu_squared": "relu2"}
"""transformers' names for values of --activation-fn, if they differ."""

BOS, LONGEST = 0, 200
"""Index of <s>; largest number of units in a translation, as in fairseq-generate."""


def write(model: Exportable, output: Path, folder: Path, tolerance: float) -> tuple[str, list[str]]:
    """Write the folder and check it. It gets a tokenizer if FSMTTokenizer does what text.json says.

    Args:
        model: the model to export.
        output: the folder's name in messages.
        folder: the folder to write, which does not exist yet.
        tolerance: largest difference.

    Returns:
        A summary of the check, and notes.

    Raises:
        AdminError: FSMT does not compute this model; or the disk is full.
    """
    logs = need("transformers").utils.logging
    logs.set_verbosity_error()  # `compare` finds what matters
    logs.disable_progress_bar()
    refuse_other_kinds(model.options)
    from safetensors import SafetensorError  # with transformers

    with outputs.writing(output, SafetensorError):
        folder.mkdir()
        convert(model, folder)
    largest, positions = compare(model, folder)
    refuse_unlike(largest, tolerance, f"{positions} positions")
    reason = tokenizer.unlike(model)
    if reason is None:
        with outputs.writing(output):
            files = tokenizer.write(model, folder)
        reason = tokenizer.difference(model, folder)
        for file in files if reason else ():
            file.unlink()
    return (
        f"FSMT{'' if reason else ' with its tokenizer'}; log-probabilities of {positions} positions differ by up to "
        f"{largest:.2g}"
    ), [f"no tokenizer was written: {reason}."] if reason else []


def refuse_other_kinds(options: Namespace) -> None:
    """Refuse a Transformer that FSMT does not compute.

    Args:
        options: the options of the stock model.

    Raises:
        AdminError: it is such a model; the message has all reasons.
    """
    before = options.encoder_normalize_before or options.decoder_normalize_before
    learned = options.encoder_learned_pos or options.decoder_learned_pos
    differences = {
        "it is a Pre-LN Transformer (--encoder-normalize-before or the decoder's) and FSMT is Post-LN": before,
        "its positions are learned (--encoder-learned-pos or the decoder's) and FSMT's are sinusoidal": learned,
        "it normalises its embeddings (--layernorm-embedding) and FSMT does not": options.layernorm_embedding,
        "it has several widths (--encoder-embed-dim, --decoder-embed-dim, --decoder-output-dim) and FSMT has one": (
            len({options.encoder_embed_dim, options.decoder_embed_dim, options.decoder_output_dim}) > 1
        ),
        "it has an adaptive softmax (--adaptive-softmax-cutoff) and FSMT has none": options.adaptive_softmax_cutoff,
    }
    if reasons := [reason for reason, holds in differences.items() if holds]:
        raise AdminError(f"this model is not an FSMT: {'; '.join(reasons)}. Export it --to ctranslate2.")


def convert(model: Exportable, folder: Path) -> None:
    """Write config.json, generation_config.json and model.safetensors.

    Args:
        model: the model to export.
        folder: the folder to write into, which exists.

    Raises:
        OSError, SafetensorError: the disk is full.
    """
    transformers = need("transformers")
    options = model.options
    weights = build(model.stock).state_dict()
    tables = ("encoder.embed_tokens", "decoder.embed_tokens", "decoder.output_projection")
    source, target, output = (weights[f"{name}.weight"] for name in tables)
    search = {
        # fairseq counts neither the unit that starts a translation nor the one that ends it.
        "max_length": min(LONGEST, options.max_target_positions - 1) + 2,
        "num_beams": 5,
        "early_stopping": True,
        "length_penalty": 1.0,
    }
    special = {"bos_token_id": BOS, "pad_token_id": PAD, "eos_token_id": EOS}
    special.update(decoder_start_token_id=EOS, forced_eos_token_id=EOS)
    names = {"layers": "layers", "ffn_dim": "ffn_embed_dim"}
    names.update(attention_heads="attention_heads", layerdrop="layerdrop")
    sizes = {
        f"{stack}_{name}": getattr(options, f"{stack}_{option}")
        for stack in ("encoder", "decoder")
        for name, option in names.items()
    }
    fsmt = transformers.FSMTForConditionalGeneration(
        transformers.FSMTConfig(
            langs=list(model.languages),
            src_vocab_size=len(source),
            tgt_vocab_size=len(target),
            d_model=options.decoder_embed_dim,
            activation_function=ACTIVATIONS.get(options.activation_fn, options.activation_fn),
            max_position_embeddings=min(options.max_source_positions, options.max_target_positions),
            dropout=options.dropout,
            attention_dropout=options.attention_dropout,
            activation_dropout=options.activation_dropout or options.relu_dropout,
            scale_embedding=not options.no_scale_embedding,
            tie_word_embeddings=torch.equal(source, target) and torch.equal(source, output),
            **sizes,
            **search,
            **special,
        )
    ).eval()
    # fairseq's search never chooses padding, and never ends before the first unit.
    fsmt.generation_config = transformers.GenerationConfig(**search, **special, suppress_tokens=[PAD], min_new_tokens=1)
    fsmt.load_state_dict({f"model.{key}": weight for key, weight in weights.items()}, strict=False)
    fsmt.save_pretrained(str(folder))
    # safetensors writes a file that only its owner may read
    shutil.copymode(folder / "config.json", folder / "model.safetensors")


def compare(model: Exportable, folder: Path) -> tuple[float, int]:
    """Compare the folder's log-probabilities with the checkpoint's.

    Args:
        model: the exported model.
        folder: its folder.

    Returns:
        The largest difference, and the number of target positions.
    """
    fsmt = need("transformers").AutoModelForSeq2SeqLM.from_pretrained(str(folder), local_files_only=True).eval()
    tests = batches(model)
    differences, positions = [], 0
    for expected, batch in zip(log_probabilities(build(model.original), tests), tests):
        # fairseq pads sources on the left, most users of transformers on the right.
        source, target = batch["src_tokens"], batch["prev_output_tokens"]
        for tokens in (source, convert_padding_direction(source, PAD, left_to_right=True)):
            mask = tokens.ne(PAD).long()
            with torch.no_grad():
                output = fsmt(input_ids=tokens, attention_mask=mask, decoder_input_ids=target, use_cache=False)
            computed = output.logits.log_softmax(-1)[target.ne(PAD)]
            differences.append((computed - expected).abs().max())
            positions += len(expected)
    return torch.stack(differences).max().item(), positions
