"""Small fresh Post-LN models of torch and transformers, each with a batch, and a BERT with ω written out."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

import fairseq_admin.pytorch as admin

WORDS = 60
PADDED = torch.tensor([[1] * 7, [1] * 5 + [0] * 2, [1] * 6 + [0]])
"""Three sentences of up to seven words. Shape (B, T)."""

ENCODER = {
    **{"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24},
    "initializer_range": 0.3,  # larger than usual: the model is so narrow that its branches would be tiny
}
BOTH = {
    **{"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24},
    **{"encoder_attention_heads": 2, "decoder_attention_heads": 2, "bos_token_id": 0, "decoder_start_token_id": 2},
    **{"pad_token_id": 1, "eos_token_id": 2, "init_std": 0.3},
}


def ids(seed: int = 1) -> Tensor:
    """Random words, with 1 for padding. Shape (B, T)."""
    words = torch.randint(5, WORDS, PADDED.shape, generator=torch.Generator().manual_seed(seed))
    return words.masked_fill(PADDED == 0, 1)


def build(name: str, dtype: torch.dtype = torch.float64, **options: Any) -> tuple[Any, dict[str, Any]]:
    """A fresh model in training mode and its batch."""
    torch.manual_seed(1)
    model: Any
    batch: dict[str, Any] = {"input_ids": ids(), "attention_mask": PADDED}
    if name == "encoder":
        layer = nn.TransformerEncoderLayer(16, 2, 24, options.get("dropout", 0.1), batch_first=True)
        model = nn.TransformerEncoder(layer, 3)
        for copied in model.layers:  # nn.TransformerEncoder starts all layers with the same weights
            for parameter in copied.parameters():
                if parameter.dim() > 1:
                    nn.init.xavier_uniform_(parameter)
        batch = {"src": torch.randn(3, 7, 16), "src_key_padding_mask": PADDED == 0}
    elif name == "transformer":
        model = nn.Transformer(16, 2, 2, 2, 24, options.get("dropout", 0.1))
        batch = {"src": torch.randn(7, 3, 16), "tgt": torch.randn(7, 3, 16), "src_key_padding_mask": PADDED == 0}
        batch |= {"tgt_key_padding_mask": PADDED == 0, "tgt_mask": torch.ones(7, 7).triu(1).bool()}
    elif name == "bert":
        model = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=WORDS, **ENCODER, **options))
        batch["labels"] = ids()
    else:
        config, model_class = {
            "bart": (transformers.BartConfig, transformers.BartForConditionalGeneration),
            "marian": (transformers.MarianConfig, transformers.MarianMTModel),
        }[name]
        model = model_class(config(vocab_size=WORDS, **BOTH, **options))
        batch["labels"] = ids(2).masked_fill(PADDED == 0, -100)
    floats = {key: value.to(dtype) for key, value in batch.items() if value.is_floating_point()}
    return model.to(dtype).train(), {**batch, **floats}


QUIET = {
    "encoder": {"dropout": 0.0},
    "bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "bart": {"dropout": 0.0},
}
"""Options of `build` for a model without dropout."""

NAMES = ["encoder", "transformer", "bert", "bart", "marian"]


def output(model: Any, batch: dict[str, Any]) -> Tensor:
    """A model's output, with a fixed random seed."""
    torch.manual_seed(2)
    result = model(**batch)
    return result if isinstance(result, Tensor) else result["logits"]


def perturbed(model: Any) -> Any:
    """The model with a different ω at every channel, as after training."""
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if name.endswith("omega_delta"):
            parameter.data = torch.empty_like(parameter).uniform_(-0.4, 0.6, generator=generator)
    return model


def trained(name: str, dtype: torch.dtype = torch.float64, **options: Any) -> tuple[Any, dict[str, Any]]:
    """An attached model, as in the middle of training, and its batch."""
    model, batch = build(name, dtype, **options)
    admin.attach(model, batch)
    admin.profile(model, batch)
    return perturbed(model), batch


class WrittenOut(nn.Module):
    """A BERT whose output modules have their own forward, which computes LN(x ⊙ ω + f(x)).

    Each ω is a parameter of this module; `omegas` has the order of the sub-layers.
    """

    def __init__(self, model: Any, omegas: list[Tensor]) -> None:
        super().__init__()
        self.model = model
        self.omegas = nn.ParameterList([nn.Parameter(omega.clone()) for omega in omegas])
        modules = [module for layer in model.bert.encoder.layer for module in (layer.attention.output, layer.output)]
        for module, omega in zip(modules, self.omegas):
            module.forward = lambda f, x, m=module, w=omega: m.LayerNorm(m.dropout(m.dense(f)) + x * w)

    def forward(self, **batch: Any) -> Any:
        return self.model(**batch)


X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
"""A batch of a `Stack`. Shape (B, T, C)."""


class Stack(nn.Module):
    """A norm, three layers of one class, and a projection."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.before, self.out = nn.LayerNorm(8), nn.Linear(8, 8)
        self.layers = nn.ModuleList([layer() for _ in range(3)])

    def forward(self, x: Any) -> Any:
        x = self.before(x)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


class ChannelsFirst(nn.Module):
    """A layer of a `Stack` in which channels come before positions."""

    def __init__(self):
        super().__init__()
        self.norm, self.convolution = nn.BatchNorm1d(8), nn.Conv1d(8, 8, 1)

    def forward(self, x):
        x = x.transpose(1, 2)
        return self.norm(x + self.convolution(x).tanh()).transpose(1, 2)
