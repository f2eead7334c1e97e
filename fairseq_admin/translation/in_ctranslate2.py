"""CTranslate2's folders as an engine.

B sentences   T target units
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ..errors import AdminError, line
from ..text.bpe import in_pieces
from .engines import MORE, Hypothesis, Search, Translator, chosen, missing
from .positions import Damaged, positions


class CTranslate2Translator(Translator):
    """A folder that a converter of CTranslate2 wrote."""

    def __init__(self, folder: Path, device: str | None) -> None:
        """Load the model.

        Raises:
            AdminError: ctranslate2 is not installed, the folder is damaged, or CUDA was asked for and lacks a library.
        """
        try:
            import ctranslate2
        except ImportError:
            raise AdminError(missing("ctranslate2", folder, "'ctranslate2>=4.8.1'")) from None
        on = chosen(device, ctranslate2.get_cuda_device_count() > 0)
        try:
            self.model = ctranslate2.Translator(str(folder), device=on)
            self.positions = positions(folder / "model.bin")
            units = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*vocabulary.json")]
            lacking = self._missing_library() if on == "cuda" else ""
            if lacking and not device:
                self.model = ctranslate2.Translator(str(folder), device="cpu")
        except (OSError, RuntimeError, ValueError, Damaged) as error:
            raise AdminError(f"{folder} is no whole CTranslate2 model ({line(error)}). Export it again.") from None
        if lacking and device:
            raise AdminError(
                f"--device cuda: {lacking}; ctranslate2 is built for CUDA 12. Run pip install nvidia-cublas-cu12 and "
                "put the folder of its library on LD_LIBRARY_PATH, or give --device cpu."
            )
        if lacking:
            print(f"fairseq-admin: {lacking}, which ctranslate2 needs for CUDA; using the CPU.", file=sys.stderr)
        self.in_pieces = in_pieces(itertools.chain(*units))
        self.longest = self.positions - 1

    def _missing_library(self) -> str:
        """What ctranslate2 says of a library of CUDA's that it does not find, for which it looks at the first batch."""
        try:
            self.model.translate_batch([["</s>"]], max_decoding_length=1)
        except RuntimeError as error:
            if "cannot be loaded" not in str(error):
                raise
            return line(error)
        return ""

    def translate(self, batch: Sequence[list[str]], search: Search) -> list[list[Hypothesis]]:
        found = self.model.translate_batch(
            list(batch),
            beam_size=search.beam,
            num_hypotheses=search.nbest,
            length_penalty=search.length_penalty,
            max_input_length=0,
            max_decoding_length=min(max(map(len, batch)) + 1 + MORE, self.positions - 1) + 1,
            return_scores=True,
        )
        return [
            [
                Hypothesis(score, [unit for unit in units if unit not in ("<s>", "</s>", "<blank>")])
                for score, units in zip(result.scores, result.hypotheses)
            ]
            for result in found
        ]
