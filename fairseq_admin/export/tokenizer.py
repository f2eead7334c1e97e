"""Write the files of an FSMTTokenizer, if it prepares text as text.json says.

FSMTTokenizer marks the last unit of a word with "</w>"; fairseq marks all other units with "@@". Both number the units
alike.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from fairseq.data import Dictionary

from ..checkpoints.equivalence import FIRST_WORD
from ..text import JOINERS
from ..text.bpe import BPE, CODES, remove_bpe
from ..text.tokens import FILE
from .exportable import Exportable

ALWAYS = ("normalise", "aggressive_dashes", "escape")
"""Settings that FSMTTokenizer always has on."""


def unlike(model: Exportable) -> str | None:
    """Find a reason why FSMTTokenizer cannot prepare a model's text.

    Args:
        model: the model to export.

    Returns:
        The reason, in words. None: it can.
    """
    if model.text is None or CODES not in model.files:
        return f"{FILE if model.text is None else CODES} was not found"
    if model.text.perl:
        return f"FSMTTokenizer cannot do what {FILE} has on (perl)"
    if any(joiner in unit for unit in model.source.symbols for joiner in JOINERS):
        return "FSMTTokenizer removes zero-width joiners, which the dictionary has"
    off = [name for name in ALWAYS if not getattr(model.text, name)]
    return f"FSMTTokenizer always does what {FILE} has off ({', '.join(off)})" if off else None


def write(model: Exportable, folder: Path) -> list[Path]:
    """Write vocab-src.json, vocab-tgt.json, merges.txt and tokenizer_config.json.

    Args:
        model: the model to export.
        folder: the folder to write into, which exists.

    Returns:
        Their paths.
    """
    assert model.text is not None
    config = {
        "tokenizer_class": "FSMTTokenizer",
        "langs": list(model.languages),
        "do_lower_case": model.text.lowercase,
        "model_max_length": min(model.options.max_source_positions, model.options.max_target_positions),
        "clean_up_tokenization_spaces": False,
    }
    codes = model.files[CODES].read_text(encoding="utf-8").rstrip("\n").split("\n")
    files = {
        "vocab-src.json": _json(vocabulary(model.source)),
        "vocab-tgt.json": _json(vocabulary(model.target)),
        "merges.txt": "".join(" ".join(merge.split()[:2]) + "\n" for merge in codes),
        "tokenizer_config.json": _json(config),
    }
    for name, content in files.items():
        (folder / name).write_text(content, encoding="utf-8")
    return [folder / name for name in files]


def vocabulary(words: Dictionary) -> dict[str, int]:
    """FSMTTokenizer's units: "un@@" is "un", and "able" is "able</w>".

    Args:
        words: the model's dictionary.

    Returns:
        Units and their indices.
    """
    return {
        unit if number < FIRST_WORD else unit[:-2] if unit.endswith("@@") else f"{unit}</w>": number
        for number, unit in enumerate(words.symbols)
    }


def difference(model: Exportable, folder: Path, lines: int = 50) -> str | None:
    """Compare the folder's tokenizer with our text pipeline on random units, the same at every call.

    Args:
        model: the model to export.
        folder: the folder with the tokenizer's files.
        lines: number of lines to compare.

    Returns:
        The first difference, in words, or None.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    text, bpe, generator = model.text, BPE(model.files[CODES]), random.Random(1)
    assert text is not None
    for _ in range(lines):
        line = remove_bpe(" ".join(_random_units(model.source, generator)))
        (units,) = bpe.apply([text.tokenise(line, text.source)])
        if tokenizer(line).input_ids != _numbers(units.split(), model.source):
            return f"FSMTTokenizer splits {line!r} otherwise"
        translation = _random_units(model.target, generator)
        joined = tokenizer.decode(_numbers(translation, model.target), skip_special_tokens=True)
        if joined != text.detokenise(remove_bpe(" ".join(translation))):
            return f"FSMTTokenizer joins {' '.join(translation)!r} otherwise"
    return None


def _numbers(units: list[str], words: Dictionary) -> list[int]:
    return [*map(words.index, units), words.eos()]


def _random_units(words: Dictionary, generator: random.Random) -> list[str]:
    return [words[generator.randrange(FIRST_WORD, len(words))] for _ in range(generator.randint(1, 12))]


def _json(content: object) -> str:
    return json.dumps(content, ensure_ascii=False, indent=1) + "\n"
