"""Three engines behind one interface: fairseq's checkpoints, CTranslate2's folders, Hugging Face's FSMT folders.

They search alike: beam search that ends when as many hypotheses as the beam is wide are complete, scores divided by the
length (end of sentence included) to a power, at most MORE units longer than the source.

    B sentences   T target units
"""

from __future__ import annotations

import abc
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from fairseq.data import Dictionary
from fairseq.sequence_generator import SequenceGenerator
from torch import Tensor
from torch.nn import functional

from ..checkpoints.building import build, check
from ..checkpoints.checkpoint import Checkpoint
from ..errors import AdminError
from ..text.assets import Assets
from ..text.bpe import in_pieces
from .positions import Damaged, positions

MORE = 200
"""How many units longer than the source a translation may become: fairseq's bound for any source, plus the source."""


class Hypothesis(NamedTuple):
    """A translation in units, and its log-probability (natural logarithm) over its length to the length penalty."""

    score: float
    units: list[str]


class Search(NamedTuple):
    """How to search: width of the beam, power of the length that divides scores, how many hypotheses to return."""

    beam: int = 5
    length_penalty: float = 1.0
    nbest: int = 1


class Translator(abc.ABC):
    """A model that translates units into units."""

    longest: int
    """The most units a source sentence may have."""
    in_pieces: bool
    """Whether its source units are pieces of words, of which there must be the merges."""

    @abc.abstractmethod
    def translate(self, batch: Sequence[list[str]], search: Search) -> list[list[Hypothesis]]:
        """The best hypotheses of each sentence, the best first: search.nbest of them, or as many as were found.

        Args:
            batch: sentences of 1 to `longest` units, translated all at once.
        """


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
            AdminError: the model is of an unknown kind or damaged, or the dictionaries are not its own.
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
            raise AdminError(_missing("ctranslate2", folder, "'ctranslate2>=4.8.1'")) from None
        on = chosen(device, ctranslate2.get_cuda_device_count() > 0)
        try:
            self.model = ctranslate2.Translator(str(folder), device=on)
            self.positions = positions(folder / "model.bin")
            units = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*vocabulary.json")]
            missing = self._missing_library() if on == "cuda" else ""
            if missing and not device:
                self.model = ctranslate2.Translator(str(folder), device="cpu")
        except (OSError, RuntimeError, ValueError, Damaged) as error:
            raise AdminError(f"{folder} is no whole CTranslate2 model ({_line(error)}). Export it again.") from None
        if missing and device:
            raise AdminError(
                f"--device cuda: {missing}; ctranslate2 is built for CUDA 12. Run pip install nvidia-cublas-cu12 and "
                "put the folder of its library on LD_LIBRARY_PATH, or give --device cpu."
            )
        if missing:
            print(f"fairseq-admin: {missing}, which ctranslate2 needs for CUDA; using the CPU.", file=sys.stderr)
        self.in_pieces = in_pieces(itertools.chain(*units))
        self.longest = self.positions - 1

    def _missing_library(self) -> str:
        """What ctranslate2 says of a library of CUDA's that it does not find, for which it looks at the first batch."""
        try:
            self.model.translate_batch([["</s>"]], max_decoding_length=1)
        except RuntimeError as error:
            if "cannot be loaded" not in str(error):
                raise
            return _line(error)
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
            raise AdminError(_missing("transformers", folder, "'transformers>=5' safetensors")) from None
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        self.device = chosen(device, torch.cuda.is_available())
        try:
            self.model = transformers.AutoModelForSeq2SeqLM.from_pretrained(
                folder, local_files_only=True, use_safetensors=True
            )
        except Exception as error:  # of its files' many readers
            raise AdminError(f"{folder} is no whole FSMT model ({_line(error)}). Export it again.") from None
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


def chosen(device: str | None, cuda: bool) -> str:
    """The device asked for, or the best there is.

    Raises:
        AdminError: CUDA was asked for and is not there.
    """
    if device == "cuda" and not cuda:
        raise AdminError("--device cuda: no CUDA device was found. Give --device cpu, or install a build for CUDA.")
    return device or ("cuda" if cuda else "cpu")


def padded(batch: Sequence[list[str]], words: Dictionary, left: bool) -> Tensor:
    """The sentences' numbers, each ended and padded on one side to the longest. Shape (B, longest + 1)."""
    tokens = torch.full((len(batch), max(map(len, batch)) + 1), words.pad())
    for row, units in zip(tokens, batch):
        numbers = torch.tensor([*map(words.index, units), words.eos()])
        row[len(row) - len(numbers) if left else 0 :][: len(numbers)] = numbers
    return tokens


def spelled(numbers: list[int], words: Dictionary) -> list[str]:
    """The units of a hypothesis, without beginning, end and padding."""
    return [words[number] for number in numbers if number not in (words.bos(), words.eos(), words.pad())]


def _missing(package: str, folder: Path, packages: str) -> str:
    return f"{folder} needs {package}, which is not installed. Run pip install {packages}."


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
