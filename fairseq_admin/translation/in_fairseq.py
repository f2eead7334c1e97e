"""fairseq's checkpoints, Admin's and stock Transformers', as an engine.

B sentences   T target units
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from fairseq.sequence_generator import SequenceGenerator

from ..checkpoints.building import build, check
from ..checkpoints.checkpoint import Checkpoint
from ..text.assets import Assets
from ..text.bpe import in_pieces
from .engines import MORE, Hypothesis, Search, Translator, chosen, padded, spelled


class FairseqTranslator(Translator):
    """A checkpoint of fairseq's, Admin's or a stock Transformer's."""

    def __init__(self, checkpoint: Checkpoint, assets: Assets, languages: tuple[str, str], device: str | None) -> None:
        """Build the model.

        Args:
            checkpoint: of a translation model.
            assets: with the dictionaries.
            languages: source and target, by which the dictionaries are named.
            device: "cpu" or "cuda"; None: the best there is.

        Raises:
            AdminError: the model is damaged, this fairseq does not know it, or the dictionaries are not its own.
        """
        self.device = chosen(device, torch.cuda.is_available())
        check(checkpoint)
        self.source, self.target = map(
            assets.dictionary, languages, checkpoint.vocabulary.values(), checkpoint.vocabulary
        )
        self.in_pieces = in_pieces(self.source.symbols)
        self.model = build(checkpoint, self.source, self.target).to(self.device)
        self.model.make_generation_fast_(beamable_mm_beam_size=None, need_attn=False)
        self.pads_left = str(checkpoint.options.task.get("left_pad_source", True)) == "True"  # older fairseq: text
        self.longest = min(self.model.max_positions()) - 1

    def translate(self, batch: Sequence[list[str]], search: Search) -> list[list[Hypothesis]]:
        words = self.target
        generator = SequenceGenerator(
            [self.model], words, search.beam, max_len_a=1, max_len_b=MORE, len_penalty=search.length_penalty
        )
        tokens = padded(batch, self.source, left=self.pads_left)
        lengths = tokens.ne(words.pad()).sum(1)
        sample = {"net_input": {"src_tokens": tokens.to(self.device), "src_lengths": lengths.to(self.device)}}
        return [
            [Hypothesis(h["score"].item(), spelled(h["tokens"].tolist(), words)) for h in found[: search.nbest]]
            for found in generator.generate([self.model], sample)
        ]
