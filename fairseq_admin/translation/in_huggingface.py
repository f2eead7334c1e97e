"""The engine for Hugging Face's FSMT folders.

B sentences   T target units
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from ..errors import AdminError, line
from ..packages import need
from ..text.assets import Assets
from ..text.bpe import in_pieces
from .engines import MORE, Hypothesis, Search, Translator, choose_device, padded, spelled


class HuggingFaceTranslator(Translator):
    """A folder with an FSMT model: the Transformer that fairseq calls transformer_wmt_en_de."""

    def __init__(self, model: Path, assets: Assets, device: str | None) -> None:
        transformers = need("transformers")
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        self.device = choose_device(device, torch.cuda.is_available())
        try:
            kind = transformers.AutoConfig.from_pretrained(model, local_files_only=True).model_type
            self.model = transformers.FSMTForConditionalGeneration.from_pretrained(
                model, local_files_only=True, use_safetensors=True
            )
        except Exception as error:  # its files have many readers
            raise AdminError(f"{model} is not a whole FSMT model ({line(error)}). Export it again.") from None
        if kind != "fsmt":
            raise AdminError(f"{model} holds a {kind} model; expected FSMT. No other of Hugging Face's is read.")
        self.model.eval().to(self.device)
        config = self.model.config
        sizes = config.src_vocab_size, config.tgt_vocab_size
        self.source, self.target = map(
            assets.dictionary, assets.languages(*config.langs), sizes, ("encoder", "decoder")
        )
        self.in_pieces = in_pieces(self.source.symbols)
        self.positions = config.max_position_embeddings
        self.longest = self.positions - 1

    @torch.no_grad()
    def translate(self, batch: Sequence[list[str]], search: Search) -> list[list[Hypothesis]]:
        tokens = padded(batch, self.source, left=False).to(self.device)
        mask = tokens.ne(self.source.pad())
        ranks = (
            self.model.generate(
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
            )
            .view(len(batch), search.nbest, -1)
            .unbind(1)
        )
        scores = [self._scores(tokens, mask, rank, search.length_penalty).tolist() for rank in ranks]
        return [
            [Hypothesis(score, spelled(units, self.target)) for score, units in zip(*sentence)]
            for sentence in zip(zip(*scores), zip(*ranks))
        ]

    def _scores(self, tokens: Tensor, mask: Tensor, hypotheses: Tensor, length_penalty: float) -> Tensor:
        """Score one hypothesis of each sentence. Shapes (B, T + 1) -> (B,). (generate() would keep every step's.)"""
        decoded = hypotheses[:, :-1]
        logits = self.model(tokens, attention_mask=mask, decoder_input_ids=decoded, use_cache=False).logits
        losses = functional.cross_entropy(
            logits.transpose(1, 2), hypotheses[:, 1:], ignore_index=self.target.pad(), reduction="none"
        )
        return -losses.sum(1) / hypotheses[:, 1:].ne(self.target.pad()).sum(1).pow(length_penalty)
