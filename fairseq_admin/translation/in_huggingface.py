"""Hugging Face's FSMT folders as an engine.

B sentences   T target units
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from ..errors import AdminError, line
from ..text.assets import Assets
from ..text.bpe import in_pieces
from .engines import MORE, Hypothesis, Search, Translator, chosen, missing, padded, spelled


class HuggingFaceTranslator(Translator):
    """A folder with an FSMT model: the Transformer that fairseq calls transformer_wmt_en_de."""

    def __init__(self, folder: Path, assets: Assets, languages: tuple[str, str], device: str | None) -> None:
        """Load the model.

        Args:
            folder: with config.json and model.safetensors.
            assets: with fairseq's dictionaries, whose units are numbered as the model's are.
            languages: source and target, by which the dictionaries are named.

        Raises:
            AdminError: transformers is not installed, the folder is damaged, or a dictionary is not the model's.
        """
        try:
            import transformers
        except ImportError:
            raise AdminError(missing("transformers", folder, "'transformers>=5' safetensors")) from None
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        self.device = chosen(device, torch.cuda.is_available())
        try:
            self.model = transformers.AutoModelForSeq2SeqLM.from_pretrained(
                folder, local_files_only=True, use_safetensors=True
            )
        except Exception as error:  # of its files' many readers
            raise AdminError(f"{folder} is no whole FSMT model ({line(error)}). Export it again.") from None
        self.model.eval().to(self.device)
        sizes = self.model.config.src_vocab_size, self.model.config.tgt_vocab_size
        self.source, self.target = map(assets.dictionary, languages, sizes, ("encoder", "decoder"))
        self.in_pieces = in_pieces(self.source.symbols)
        self.positions = self.model.config.max_position_embeddings
        self.longest = self.positions - 1

    @torch.no_grad()
    def translate(self, batch: Sequence[list[str]], search: Search) -> list[list[Hypothesis]]:
        tokens = padded(batch, self.source, left=False).to(self.device)
        mask = tokens.ne(self.source.pad())
        hypotheses = self.model.generate(
            tokens,
            attention_mask=mask,
            num_beams=search.beam,
            num_return_sequences=search.nbest,
            length_penalty=search.length_penalty,
            early_stopping=search.beam > 1,
            do_sample=False,
            min_new_tokens=1,
            max_new_tokens=min(tokens.size(1) + MORE, self.positions - 1) + 1,
            max_length=None,
            suppress_tokens=[self.target.pad()],
        ).view(len(batch), search.nbest, -1)
        found: list[list[Hypothesis]] = [[] for _ in batch]
        for rank in hypotheses.unbind(1):
            scores = self._scores(tokens, mask, rank, search.length_penalty)
            for row, (score, units) in enumerate(zip(scores.tolist(), rank.tolist())):
                found[row].append(Hypothesis(score, spelled(units, self.target)))
        return found

    def _scores(self, tokens: Tensor, mask: Tensor, hypotheses: Tensor, length_penalty: float) -> Tensor:
        """Scores of one hypothesis a sentence, shape (B, T + 1), shape (B,). generate() would keep every step's."""
        decoded = hypotheses[:, :-1]
        logits = self.model(tokens, attention_mask=mask, decoder_input_ids=decoded, use_cache=False).logits
        losses = functional.cross_entropy(
            logits.transpose(1, 2), hypotheses[:, 1:], ignore_index=self.target.pad(), reduction="none"
        )
        return -losses.sum(1) / hypotheses[:, 1:].ne(self.target.pad()).sum(1).pow(length_penalty)
