"""A folder that Hugging Face's transformers read: FSMT, which is fairseq's Post-LN Transformer.

B sentences   T units of a sentence   V vocabulary
"""

from __future__ import annotations

import contextlib
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from fairseq.sequence_generator import SequenceGenerator
from torch import Tensor

from ..checkpoints.building import build
from ..checkpoints.equivalence import EOS, PAD, Batch, log_probabilities
from ..errors import AdminError
from .exportable import Exportable, batches, sentences

BOUND = 1e-4
"""Largest difference of a log-probability: an 18L-18L model's was 1.4e-5, by the order of sums."""

ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_accurate": "gelu_new",
    "gelu_fast": "gelu_new",
    "tanh": "tanh",
    "linear": "linear",
}
"""fairseq's names and transformers'. (fairseq's swish does not run.)"""

BOS, LONGEST, GREEDY = 0, 200, 20
"""The index of <s>; units of a translation at most, as in fairseq-generate; of one that `check` compares."""


class Checked(NamedTuple):
    """How the folder's log-probabilities differ from the checkpoint's, and how many greedy translations are equal."""

    largest: float
    positions: int
    equal: int
    translations: int


def installed() -> ModuleType:
    """The package.

    Raises:
        AdminError: it is not there.
    """
    try:
        import safetensors.torch  # noqa: F401
        import transformers
    except ImportError:
        raise AdminError("transformers is not installed. Run pip install 'transformers>=5' safetensors.") from None
    return transformers


def _refuse_unlike(model: Exportable) -> None:
    """Refuse what FSMT does not compute."""
    options = model.options
    reasons = []
    for stack in ("encoder", "decoder"):
        if getattr(options, f"{stack}_normalize_before"):
            reasons.append(f"it is a Pre-LN Transformer (--{stack}-normalize-before) and FSMT is Post-LN")
        if getattr(options, f"{stack}_learned_pos"):
            reasons.append(f"its positions are learned (--{stack}-learned-pos) and FSMT's are sinusoidal")
    if getattr(options, "layernorm_embedding", False):
        reasons.append("it normalises its embeddings (--layernorm-embedding) and FSMT does not")
    if options.encoder_embed_dim != options.decoder_embed_dim:
        reasons.append(
            f"--encoder-embed-dim is {options.encoder_embed_dim} and --decoder-embed-dim {options.decoder_embed_dim}, "
            "and FSMT has one width"
        )
    if options.activation_fn not in ACTIVATIONS:
        reasons.append(f"--activation-fn is {options.activation_fn} and transformers know {', '.join(ACTIVATIONS)}")
    if reasons:
        raise AdminError(f"this model is not an FSMT: {'; '.join(dict.fromkeys(reasons))}. Export it --to ctranslate2.")


def _sizes(options: Namespace) -> dict[str, Any]:
    """The sizes of either stack, by FSMTConfig's names."""
    return {
        f"{stack}_{name}": getattr(options, f"{stack}_{option}")
        for stack in ("encoder", "decoder")
        for name, option in (
            ("layers", "layers"),
            ("ffn_dim", "ffn_embed_dim"),
            ("attention_heads", "attention_heads"),
            ("layerdrop", "layerdrop"),
        )
    }


def convert(model: Exportable, folder: Path) -> None:
    """Write config.json, generation_config.json and model.safetensors into a folder that exists.

    Raises:
        AdminError: FSMT does not compute this model.
        OSError: the disk is full.
    """
    transformers = installed()
    _refuse_unlike(model)
    options = model.options
    weights = build(model.stock).state_dict()
    tables = [
        f"{name}.weight" for name in ("encoder.embed_tokens", "decoder.embed_tokens", "decoder.output_projection")
    ]
    tied = all(torch.equal(weights[tables[0]], weights[name]) for name in tables[1:])
    search = {
        # fairseq counts neither the unit that starts a translation nor the one that ends it.
        "max_length": min(LONGEST, options.max_target_positions - 1) + 2,
        "num_beams": 5,
        "early_stopping": True,
        "length_penalty": 1.0,
    }
    special = {"bos_token_id": BOS, "pad_token_id": PAD, "eos_token_id": EOS}
    special.update(decoder_start_token_id=EOS, forced_eos_token_id=EOS)
    fsmt = transformers.FSMTForConditionalGeneration(
        transformers.FSMTConfig(
            langs=list(model.languages),
            src_vocab_size=len(weights[tables[0]]),
            tgt_vocab_size=len(weights[tables[1]]),
            d_model=options.decoder_embed_dim,
            activation_function=ACTIVATIONS[options.activation_fn],
            max_position_embeddings=min(options.max_source_positions, options.max_target_positions),
            dropout=options.dropout,
            attention_dropout=options.attention_dropout,
            activation_dropout=options.activation_dropout or options.relu_dropout,
            scale_embedding=not options.no_scale_embedding,
            tie_word_embeddings=tied,
            **_sizes(options),
            **search,
            **special,
        )
    ).eval()
    # fairseq's search never takes padding, and never ends before the first unit.
    fsmt.generation_config = transformers.GenerationConfig(**search, **special, suppress_tokens=[PAD], min_new_tokens=1)
    own = fsmt.state_dict().keys()
    loaded = fsmt.load_state_dict(
        {f"model.{key}": weight for key, weight in weights.items() if f"model.{key}" in own}, False
    )
    # The sinusoids are fairseq's, computed again; transformers save them and miss them if they are not there.
    assert all(key.endswith("embed_positions.weight") for key in loaded.missing_keys), loaded
    with _quiet(transformers), _full_disk():
        fsmt.save_pretrained(str(folder))


def check(model: Exportable, folder: Path, bound: float | None) -> Checked:
    """Load the folder, and compare its log-probabilities and greedy translations with the checkpoint's.

    Args:
        model: what was exported.
        folder: what `convert` wrote.
        bound: for the largest difference; None: BOUND.

    Raises:
        AdminError: they differ by more, or the folder lacks weights or holds too many.
    """
    transformers = installed()
    with _quiet(transformers):
        fsmt, told = transformers.AutoModelForSeq2SeqLM.from_pretrained(
            str(folder), local_files_only=True, output_loading_info=True
        )
    wrong = {name: sorted(keys) for name, keys in told.items() if keys}
    if wrong:
        raise AdminError(
            f"transformers do not load what they saved: {wrong}. Nothing was written; try another version."
        )
    fsmt.eval()
    tests, ours = batches(model), build(model.original)
    limit = BOUND if bound is None else bound
    largest, positions = 0.0, 0
    for expected, batch in zip(log_probabilities(ours, tests), tests):
        # Sources are padded on the left by fairseq, and on the right by most who use transformers.
        for tokens in (batch.src_tokens, _padded_right(batch.src_tokens)):
            apart = (_log_probabilities(fsmt, tokens, batch.prev_output_tokens) - expected).abs().max().item()
            if not apart <= limit:
                raise AdminError(
                    f"exported, the log-probabilities of {len(expected)} positions differ by up to {apart:.2g}, more "
                    f"than {limit:g}. Nothing was written. Allow it with --tolerance, or translate with fairseq."
                )
            largest, positions = max(largest, apart), positions + len(expected)
    last = tests[-1]
    pairs = list(zip(_greedy(ours, model, last), _greedy_of_fsmt(fsmt, last)))
    return Checked(largest, positions, sum(a == b for a, b in pairs), len(pairs))


@torch.no_grad()
def _log_probabilities(fsmt: Any, tokens: Tensor, prev_output_tokens: Tensor) -> Tensor:
    """Of every real target position, as `equivalence.log_probabilities` gives them. Shape (positions, V)."""
    logits = fsmt(
        input_ids=tokens,
        attention_mask=tokens.ne(PAD).long(),
        decoder_input_ids=prev_output_tokens,
        use_cache=False,
    ).logits
    return logits.log_softmax(-1)[prev_output_tokens.ne(PAD)]


def _padded_right(tokens: Tensor) -> Tensor:
    """Sentences with their padding moved behind them. Shape (B, T)."""
    return tokens.gather(1, tokens.eq(PAD).long().sort(stable=True, dim=1).indices)


def _greedy(ours: Any, model: Exportable, batch: Batch) -> list[list[int]]:
    generator = SequenceGenerator([ours], model.target, beam_size=1, max_len_a=0, max_len_b=GREEDY)
    net_input = {"src_tokens": batch.src_tokens, "src_lengths": batch.src_lengths}
    return [found[0]["tokens"][:-1].tolist() for found in generator.generate([ours], {"net_input": net_input})]


def _greedy_of_fsmt(fsmt: Any, batch: Batch) -> list[list[int]]:
    tokens = batch.src_tokens
    found = fsmt.generate(
        tokens, attention_mask=tokens.ne(PAD).long(), num_beams=1, early_stopping=False, max_length=GREEDY + 2
    )
    return [row.tolist() for row in sentences(found)]


@contextlib.contextmanager
def _quiet(transformers: ModuleType) -> Iterator[None]:
    """Neither warnings nor progress bars: what matters, `check` looks at."""
    log = transformers.utils.logging
    level, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(level)
        if bars:
            log.enable_progress_bar()


@contextlib.contextmanager
def _full_disk() -> Iterator[None]:
    """safetensors' own error of writing as the one it stands for."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        raise OSError(str(error)) from None
