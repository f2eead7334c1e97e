"""The engine for CTranslate2's folders."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from ..errors import AdminError, line
from ..packages import need
from ..text.assets import POSITIONS, Assets
from ..text.bpe import in_pieces
from .engines import MORE, Hypothesis, Search, Translator, choose_device

SPECIAL = ("<s>", "</s>", "<blank>")
"""Units that do not belong to the translation."""


class CTranslate2Translator(Translator):
    """A folder that `fairseq-admin export --to ctranslate2` wrote."""

    def __init__(self, model: Path, assets: Assets, device: str | None) -> None:
        ctranslate2 = need("ctranslate2")
        if assets.text():
            assets.languages(None, None)  # refuses other languages on the command line; the folder needs none
        chosen = choose_device(device, ctranslate2.get_cuda_device_count() > 0)
        try:
            self.model = ctranslate2.Translator(str(model), device=chosen)
            units = [json.loads(path.read_bytes()) for path in model.glob("*vocabulary.json")]
        except (OSError, RuntimeError, ValueError) as error:
            raise AdminError(f"{model} is not a whole CTranslate2 model ({line(error)}). Export it again.") from None
        self.in_pieces = any(map(in_pieces, units))
        # older folders lack the entry; 1024 is fairseq's default
        self.positions = int(assets.expected.get(POSITIONS, 1024))
        self.longest = self.positions - 1
        try:  # CTranslate2 looks for CUDA's libraries at the first batch
            self.model.translate_batch([["</s>"]], max_decoding_length=1)
        except RuntimeError as error:
            if "cannot be loaded" not in str(error):
                raise
            raise AdminError(
                f"{line(error)}, which ctranslate2 needs for CUDA 12. Run pip install nvidia-cublas-cu12 and put the "
                "folder of its library on LD_LIBRARY_PATH, or give --device cpu."
            ) from None

    def translate(self, batch: Sequence[list[str]], search: Search) -> list[list[Hypothesis]]:
        # fairseq ends a translation of this length. CTranslate2 does not: it adds one more unit.
        longest = min(max(map(len, batch)) + 1 + MORE, self.positions - 1)
        results = self.model.translate_batch(
            list(batch),
            beam_size=search.beam,
            num_hypotheses=search.nbest,
            length_penalty=search.length_penalty,
            max_input_length=0,
            max_decoding_length=longest + 1,
            return_scores=True,
        )
        return [
            [
                Hypothesis(score, " ".join([unit for unit in units if unit not in SPECIAL][:longest]))
                for score, units in zip(result.scores, result.hypotheses)
            ]
            for result in results
        ]
