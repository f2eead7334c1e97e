"""The engine for fairseq's checkpoints: Admin models and stock Transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from fairseq.data.data_utils import collate_tokens
from fairseq.sequence_generator import SequenceGenerator

from ..checkpoints.building import build, check_weights
from ..checkpoints.checkpoint import Checkpoint
from ..errors import AdminError
from ..text.assets import Assets
from ..text.bpe import in_pieces
from .engines import MORE, Hypothesis, Search, Translator, choose_device


class FairseqTranslator(Translator):
    """A checkpoint of an Admin model or a stock Transformer."""

    def __init__(self, model: Path, assets: Assets, device: str | None) -> None:
        checkpoint = Checkpoint.read(model)
        assets.expected = checkpoint.text
        task = checkpoint.options.task
        if task.get("_name") != "translation":
            raise AdminError(f"{model} was trained for the task {task.get('_name')!r}; expected 'translation'.")
        languages = assets.languages(task.get("source_lang"), task.get("target_lang"))
        self.device = choose_device(device, torch.cuda.is_available())
        check_weights(checkpoint)
        self.source, self.target = map(
            assets.dictionary, languages, checkpoint.vocabulary.values(), checkpoint.vocabulary
        )
        self.in_pieces = in_pieces(self.source.symbols)
        self.model = build(checkpoint, self.source, self.target).to(self.device)
        self.model.make_generation_fast_(beamable_mm_beam_size=None, need_attn=False)
        self.pads_left = str(task.get("left_pad_source", True)) == "True"  # older fairseq stores text
        self.longest = min(self.model.max_positions()) - 1

    def translate(self, batch: Sequence[list[str]], search: Search) -> list[list[Hypothesis]]:
        words = self.target
        generator = SequenceGenerator(
            [self.model], words, search.beam, max_len_a=1, max_len_b=MORE, len_penalty=search.length_penalty
        )
        encode = self.source.encode_line
        lines = [encode(units, line_tokenizer=list, add_if_not_exist=False).long() for units in batch]
        tokens = collate_tokens(lines, self.source.pad(), left_pad=self.pads_left).to(self.device)
        sample = {"net_input": {"src_tokens": tokens, "src_lengths": tokens.ne(self.source.pad()).sum(1)}}
        return [
            [Hypothesis(h["score"].item(), words.string(h["tokens"].tolist())) for h in hypotheses[: search.nbest]]
            for hypotheses in generator.generate([self.model], sample)
        ]
