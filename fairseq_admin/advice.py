"""fairseq-admin advise: settings for a model of a given depth, each with its source.

This file has no numbers of its own: tests compare its tables with recipes/, which train with them. How far a change of
the weights moves the output at that depth is a measurement, which `fairseq-admin analyze output-change` makes.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator
from typing import Any, NamedTuple

from .errors import AdminError
from .method.schemes import SCHEMES


class Experiment(NamedTuple):
    """An experiment of the authors' code (Transformer-Clinic, nmt-experiments)."""

    target: str
    """The recipe."""
    text: str
    encoder_layers: int
    decoder_layers: int
    lr: float
    warmup: int
    tokens: int
    """Tokens an update."""

    @property
    def name(self) -> str:
        return f"{self.text} {self.encoder_layers}L-{self.decoder_layers}L (make {self.target})"


WIDTH = 512
"""The width of every experiment's model."""
EXPERIMENTS = (
    *(Experiment(f"wmt14-ende-{n}l", "WMT'14 En-De", n, n, 1e-3, 8000, 32_768) for n in (6, 12, 18, 100)),
    Experiment("wmt14-enfr-60l", "WMT'14 En-Fr", 60, 12, 7e-4, 8000, 1_280_000),
)

FAILED = {"post-ln": ((12, 12), (18, 18), (60, 12))}
"""The depths at which the papers' tables have no score for a scheme: its training diverged."""
COMPARED = ("admin", "pre-ln", "post-ln")
"""The schemes of those tables. The first has the best score at every depth."""
TABLES = "Liu et al. 2020, tables of WMT'14 (recipes/papers.csv)"


class Line(NamedTuple):
    """One piece of advice."""

    setting: str
    advice: str
    basis: str


def nearest(encoder_layers: int, decoder_layers: int) -> Experiment | None:
    """The papers' experiment whose depths are nearest, as ratios; None for a model of one stack."""

    def distance(paper: Experiment) -> float:
        ratios = (paper.encoder_layers / encoder_layers, paper.decoder_layers / decoder_layers)
        return sum(abs(math.log(ratio)) for ratio in ratios)

    return min(EXPERIMENTS, key=distance) if encoder_layers and decoder_layers else None


def _scheme(scheme: str, encoder_layers: int, decoder_layers: int) -> Line:
    if scheme not in COMPARED:
        basis = "not in the papers' tables of WMT'14; on one small task, 18L-18L: docs/results.md (make compare)"
        return Line("scheme", f"--admin-scheme {scheme}", basis)
    if scheme in FAILED and max(encoder_layers, decoder_layers) > 6:
        failed = ", ".join(f"{n}L-{m}L" for n, m in FAILED[scheme])
        return Line("scheme", f"not {scheme}: give --admin-scheme {COMPARED[0]}", f"{TABLES}: failed at {failed}")
    best = scheme == COMPARED[0]
    score = "the best score at every depth, 6L-6L to 60L-12L" if best else "trained, with a lower score than Admin"
    return Line("scheme", f"--admin-scheme {scheme}", f"{TABLES}: {score}")


def _optimisation(experiment: Experiment | None, width: int) -> Iterator[Line]:
    if experiment is None:
        for setting in ("learning rate", "warm-up", "batch"):
            yield Line(setting, "not measured", "the papers' experiments are translation, with two stacks")
        return
    scaled = width > WIDTH
    lr = experiment.lr * (WIDTH / width if scaled else 1)
    basis = f"{experiment.name}: {experiment.lr:g} at width {WIDTH}"
    if scaled:
        basis += f", times {WIDTH}/{width} as the method's author advises (microsoft/admin-torch, issue 1)"
    elif width < WIDTH:
        basis += "; a narrower model may take more, not measured"
    yield Line("learning rate", f"--optimizer radam --lr {lr:.2g} --lr-scheduler inverse_sqrt", basis)
    yield Line("warm-up", f"--warmup-updates {experiment.warmup} --warmup-init-lr 1e-07", experiment.name)
    yield Line("batch", f"{experiment.tokens:,} tokens an update, over all devices", experiment.name)


def advise(encoder_layers: int, decoder_layers: int, width: int = WIDTH, scheme: str | None = None) -> list[Line]:
    """Suggest settings to train a model.

    Args:
        encoder_layers: 0: the model has no encoder.
        decoder_layers: 0: the model has no decoder.
        width: channels.
        scheme: its name in `SCHEMES`; None: Admin.

    Raises:
        AdminError: the model has no layer.
    """
    if not (encoder_layers or decoder_layers):
        raise AdminError("--encoder-layers 0 and --decoder-layers 0 were given; at least 1 layer is needed.")
    scheme = scheme or COMPARED[0]
    lines = [_scheme(scheme, encoder_layers, decoder_layers)]
    if SCHEMES[scheme].omega:
        basis = "the authors' code, which made the published numbers; log needs no profiling, and was not compared here"
        lines.append(Line("rule", "--admin-init reference", basis))
    lines += _optimisation(nearest(encoder_layers, decoder_layers), width)
    basis = "the authors' runs; profiling computes in float32 in any. bf16, on cards that have it: not compared here"
    lines.append(Line("precision", "--fp16 --threshold-loss-scale 0.03125", basis))
    basis = "measures how far a change of the weights moves the output of your model, by depth: docs/analysis.md"
    lines.append(Line("stability", "fairseq-admin analyze output-change --arch ARCH", basis))
    lines.append(Line("while it trains", "--admin-monitor 100", "warns of signs of divergence: docs/monitor.md"))
    return lines


def table(lines: list[Line]) -> str:
    """Format advice for people: setting and advice, and the basis below."""
    left = max(len(line.setting) for line in lines) + 2
    wrapped = textwrap.TextWrapper(100, subsequent_indent=" " * left, break_long_words=False, break_on_hyphens=False)
    text = ""
    for setting, advice, basis in lines:
        for start, content in ((setting, advice), ("", f"({basis})")):
            wrapped.initial_indent = start.ljust(left)
            text += f"{wrapped.fill(content)}\n"
    return text


def as_dict(lines: list[Line]) -> dict[str, Any]:
    """Format advice for machines: {setting: {"advice": ..., "basis": ...}}."""
    return {line.setting: {"advice": line.advice, "basis": line.basis} for line in lines}
