"""Small fresh Post-LN models of torch and transformers, each with a batch, and a BERT with ω written out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import fairseq_admin.pytorch as admin
from fairseq_admin.pytorch.batch import call
from fairseq_admin.pytorch.trace import tensors

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


def with_omega(model: Any) -> Any:
    """The attached model with another ω at every branch, from 1.5 on. (Attach gives all of a stack the same.)"""
    for number, omega in enumerate(admin.omegas(model).values()):
        omega.fill_(1.5 + number / 2)
    return model


def trained(name: str, dtype: torch.dtype = torch.float64, **options: Any) -> tuple[Any, dict[str, Any]]:
    """An attached model with a different ω at every branch, and its batch."""
    model, batch = build(name, dtype, **options)
    return with_omega(admin.attach(model, batch)), batch


class WrittenOut(nn.Module):
    """A BERT whose output modules have their own forward, which computes LN(ω x + f(x)).

    `omegas` has the order of the sub-layers.
    """

    def __init__(self, model: Any, omegas: Iterable[Tensor]) -> None:
        super().__init__()
        self.model = model
        modules = [module for layer in model.bert.encoder.layer for module in (layer.attention.output, layer.output)]
        for module, omega in zip(modules, omegas, strict=True):
            module.forward = lambda f, x, m=module, w=omega: m.LayerNorm(m.dropout(m.dense(f)) + x * w)

    def forward(self, **batch: Any) -> Any:
        return self.model(**batch)


C = 8
X = torch.randn(2, 5, C, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
"""A batch of a `Stack`. Shape (B, T, C)."""


class Layer(nn.Module):
    """A Post-LN layer whose feed-forward is written inside forward. Tests override its methods."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(C, 2, batch_first=True)
        self.a, self.b = nn.LayerNorm(C), nn.LayerNorm(C)
        self.up, self.down = nn.Linear(C, 2 * C), nn.Linear(2 * C, C)

    def attend(self, x: Tensor) -> Tensor:
        result: Tensor = self.attn(x, x, x, need_weights=False)[0]
        return result

    def feed(self, x: Tensor) -> Any:
        return self.down(nn.functional.gelu(self.up(x)))

    def forward(self, x: Tensor) -> Any:
        x = self.a(x + self.attend(x))
        return self.b(x + self.feed(x))


def layer(forward: Any = None, parts: Any = (), **methods: Any) -> Callable[[], nn.Module]:
    """A function that makes layers with another forward, other methods, and more parts: functions by name."""
    kind = type("Kind", (Layer,), {**methods, **({"forward": forward} if forward else {})})

    def make() -> nn.Module:
        made = kind()
        for name, part in dict(parts).items():
            setattr(made, name, part())
        return made

    return make


class Stack(nn.Module):
    """A norm, three layers, and a projection."""

    def __init__(self, make: Callable[[], nn.Module] = Layer) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.before, self.out = nn.LayerNorm(C), nn.Linear(C, C)
        self.layers = nn.ModuleList([make() for _ in range(3)])
        self.double()

    def forward(self, x: Tensor, *others: Tensor) -> Any:
        x = self.before(x)
        for layer in self.layers:
            x = layer(x, *others)
        return self.out(x)


SITES = [f"layers.{i}.{norm}" for i in range(3) for norm in "ab"]
"""The norms of the sub-layers of a `Stack`."""
WRITERS = [f"layers.{i}.{writer}" for i in range(3) for writer in ("attn", "down")]
"""The modules that return its branches."""


def outputs(model: nn.Module, batch: Any) -> list[Tensor]:
    """All tensors that a model returns, with a fixed random seed."""
    torch.manual_seed(2)
    return tensors(call(model, batch))


def apart(some: list[Tensor], others: list[Tensor]) -> float:
    """The largest difference between two lists of outputs."""
    return max((a - b).abs().max().item() for a, b in zip(some, others, strict=True))


def check_folds(model: nn.Module, batch: Any, stacks: list[int]) -> None:
    """Attach changes no bit at ω = 1, other ω act, and a fold keeps all outputs. `stacks`: sub-layers of each stack."""
    model.eval()
    stock = outputs(model, batch)
    admin.attach(model, batch, omega=1)
    attachment: Any = model._admin
    assert list(attachment.stacks.values()) == stacks, attachment
    assert apart(stock, outputs(model, batch)) == 0
    before = outputs(with_omega(model), batch)
    admin.fold(model, batch)
    assert apart(before, outputs(model, batch)) < 1e-12 < 1e-3 < apart(before, stock)
