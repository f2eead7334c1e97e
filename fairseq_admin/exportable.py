"""What can be exported: a stock Post-LN Transformer and the files of its text, whatever fairseq trained it as.

T units of a sentence   V vocabulary
"""

import re
from argparse import Namespace
from collections import OrderedDict
from pathlib import Path
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Tuple

import torch
from fairseq.data import Dictionary
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_NAME_REGISTRY

from . import fold
from .checkpoint import STRAY, omegas
from .equivalence import EOS, PAD, Batch, random_batches, real_batches, vocabulary
from .errors import AdminError
from .text import CODES, FILE, Text

UNKNOWN_TO_BOTH = {
    "cross_self_attention": "a decoder that attends to both sides at once",
    "no_cross_attention": "a decoder without encoder-attention",
    "no_token_positional_embeddings": "a model without positions",
    "adaptive_softmax_cutoff": "an adaptive softmax",
    "adaptive_input": "adaptive input embeddings",
}
"""Options that make of fairseq's Transformer what neither CTranslate2 nor FSMT computes."""

KNOWN_WEIGHTS = re.compile(
    r"(encoder|decoder)\.(version|embed_tokens\.weight|embed_positions\.weight|layernorm_embedding\.(weight|bias)"
    r"|layer_norm\.(weight|bias)|layers\.\d+\.((self_attn|encoder_attn)\.(q|k|v|out)_proj|fc1|fc2"
    r"|(self_attn|encoder_attn|final)_layer_norm)\.(weight|bias))|decoder\.output_projection\.weight"
)
"""What a Transformer consists of; weights by other names are extras that an engine would drop in silence."""


class Exportable(NamedTuple):
    """A model to export."""

    original: Mapping[str, Any]
    """The checkpoint as it was given: what the export is checked against."""
    stock: Dict[str, Any]
    """The same function as a checkpoint of stock fairseq, its options under `args`."""
    options: Namespace
    """The stock model's and its task's options, every one with a value."""
    source: Dictionary
    target: Dictionary
    files: Dict[str, Path]
    """What belongs beside the model: name there -> where it lies now."""
    text: Optional[Text]

    @property
    def languages(self) -> Tuple[str, str]:
        return self.options.source_lang, self.options.target_lang


def stock(state: Mapping[str, Any]) -> Dict[str, Any]:
    """A checkpoint as one of stock fairseq: an Admin model folded, a stock one with its options under `args`.

    Raises:
        AdminError: it is neither, or it cannot be folded.
    """
    model = state["model"]
    if omegas(model):
        return fold.fold(state)
    arch = fold.options(state)[0].get("_name")
    if ARCH_MODEL_NAME_REGISTRY.get(arch) != "transformer":
        raise AdminError(
            f"the checkpoint's architecture is {arch}; transformer_admin or fairseq's transformer was expected. "
            "Nothing else can be exported."
        )
    layers = {
        stack: len({key.split(".")[2] for key in model if key.startswith(f"{stack}.layers.")})
        for stack in ("encoder", "decoder")
    }
    return {
        "args": fold.stock_options(state, layers),
        "model": {key: tensor for key, tensor in model.items() if not STRAY.search(key)},
    }


def prepare(state: Mapping[str, Any], path: Path, data: Optional[Path]) -> Exportable:
    """Everything an export needs, or the reason why there can be none.

    Args:
        state: a checkpoint, as `checkpoint.read` gives it.
        path: where it lies.
        data: where dictionaries, codes and text.json lie, itself or its folder `bin`; None: beside the checkpoint.

    Raises:
        AdminError: the model is of another kind, or its dictionaries are missing or another model's.
    """
    plain = stock(state)
    options = _complete(plain["args"])
    for option, what in UNKNOWN_TO_BOTH.items():
        if getattr(options, option, None):
            raise AdminError(f"{path} was trained with --{option.replace('_', '-')}: {what} cannot be exported.")
    for name in ("decoder_input_dim", "decoder_output_dim"):
        if getattr(options, name) != options.decoder_embed_dim:
            raise AdminError(
                f"{path} was trained with --{name.replace('_', '-')} {getattr(options, name)} and --decoder-embed-dim "
                f"{options.decoder_embed_dim}: a projection between them cannot be exported."
            )
    for key in plain["model"]:
        if not KNOWN_WEIGHTS.fullmatch(key):
            raise AdminError(
                f"{path} holds {key}, which is no part of a plain Transformer, and no other engine computes more than "
                "that. It cannot be exported."
            )
    folders = [data, data / "bin"] if data else [path.parent]
    text_file = _find(FILE, folders)
    text = Text.read(text_file) if text_file else None
    options.source_lang, options.target_lang = languages = _languages(options, path, text, text_file)
    plain["args"] = OrderedDict(vars(options))
    plain["args"].__dict__.update(vars(options))
    files, dictionaries = {}, {}
    for stack, language in zip(("encoder", "decoder"), languages):
        name = f"dict.{language}.txt"
        found = _find(name, folders)
        if found is None:
            raise AdminError(
                f"there is no {name} in {' or '.join(map(str, folders))}. Give the folder that fairseq-preprocess "
                "wrote as --data."
            )
        files[name], dictionaries[stack] = found, _dictionary(found)
        size, expected = len(dictionaries[stack]), vocabulary(plain["model"], stack)
        if size != expected:
            raise AdminError(
                f"{found} has {size} symbols and the model's {stack} {expected}. Give the dictionary the model was "
                "trained with."
            )
    codes = _find(CODES, folders)
    files.update({name: found for name, found in ((CODES, codes), (FILE, text_file)) if found})
    return Exportable(state, plain, options, dictionaries["encoder"], dictionaries["decoder"], files, text)


def batches(model: Exportable) -> List[Batch]:
    """What an export is checked on: random sentences, and the first of a validation set beside the dictionaries."""
    folder = model.files[f"dict.{model.languages[1]}.txt"].parent
    found = random_batches(model.original)
    if any(folder.glob(f"valid.{'-'.join(model.languages)}.*.idx")):
        found += real_batches(model.original, folder)
    return found


def sentences(tokens: torch.Tensor) -> List[torch.Tensor]:
    """The rows without padding and, where a sentence ends, its end. Shape (B, T) to B shapes (T,)."""
    return [row[row.ne(PAD) & row.ne(EOS)] for row in tokens]


def _complete(args: Mapping[str, Any]) -> Namespace:
    """A stock model's options with a value each: training with hydra, and older fairseqs, store only some of them.

    Whatever task taught the model, it translates from one dictionary's language to the other's.
    """
    options = Namespace(**args)
    options.task = "translation"
    ARCH_CONFIG_REGISTRY[fold.ARCH](options)
    defaults = dict(max_source_positions=1024, max_target_positions=1024)
    defaults.update(encoder_layerdrop=0, decoder_layerdrop=0, relu_dropout=0)
    for name, default in defaults.items():
        if getattr(options, name, None) is None:
            setattr(options, name, default)
    return options


def _languages(options: Namespace, path: Path, text: Optional[Text], text_file: Optional[Path]) -> Tuple[str, str]:
    """The checkpoint's languages, or else those of its text.

    Raises:
        AdminError: neither tells them, or they tell different ones.
    """
    source, target = (str(getattr(options, f"{side}_lang", None) or "") for side in ("source", "target"))
    if text and not (source and target):
        source, target = text.source, text.target
    if not all(re.fullmatch(r"[\w.-]+", language) for language in (source, target)):
        raise AdminError(
            f"{path} was trained from {source!r} to {target!r}; the codes of two languages were expected, as in "
            f"dict.de.txt. Give a folder with a {FILE} as --data."
        )
    if text and (source, target) != (text.source, text.target):
        raise AdminError(
            f"{text_file} is for {text.source}-{text.target} and {path} for {source}-{target}. Give the model's own."
        )
    return source, target


def _find(name: str, folders: List[Path]) -> Optional[Path]:
    return next((folder / name for folder in folders if (folder / name).is_file()), None)


def _dictionary(path: Path) -> Dictionary:
    try:
        return Dictionary.load(str(path))
    except Exception as error:  # whatever its parser trips over
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise AdminError(f"{path} is no dictionary of fairseq's ({reason}). Give the folder that holds it.") from None
