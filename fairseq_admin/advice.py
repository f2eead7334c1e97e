"""fairseq-admin advise: what to train a model of some depth with, each line with where it is from.

A share of the output is a sub-layer's own branch's, β_{i,i}, and a small change of all weights moves the output by

    Var[ F(x, W) - F(x, W*) ] ≈ C Σ_i β²_{i,i}                          Liu et al. 2020, section 4.2, theorem 2

At initialisation branches are nearly independent, and with v_i = Var[f_i] and norms of variance 1

    Post-LN                β²_{i,i} = v_i / (1 + v_i)                   the sum is O(N): corollary 2
    Admin, and Pre-LN      β²_{i,i} = v_i / (1 + Σ_{j≤i} v_j)           O(log N): corollary 1, section 4.3

This file has no numbers of its own: tests hold its tables to recipes/, which train with them.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator
from typing import Any, NamedTuple

from .errors import AdminError
from .method.schemes import SCHEMES

ENCODER, DECODER = (0.376, 0.395), (0.446, 0.413, 0.397)
"""Var[f] of the sub-layers of a layer, in forward order."""
PROFILE = (
    "branch variances of the authors' published profile of Admin: 100L-100L, WMT'14 En-De, width 512, feed-forward "
    "2048, dropout 0.1"
)


class Experiment(NamedTuple):
    """What the authors' code trains with (Transformer-Clinic, nmt-experiments)."""

    target: str
    """The recipe here."""
    text: str
    encoder_layers: int
    decoder_layers: int
    lr: float
    warmup: int
    tokens: int
    """In an update."""

    @property
    def name(self) -> str:
        return f"{self.text} {self.encoder_layers}L-{self.decoder_layers}L (make {self.target})"


WIDTH = 512
"""Of every experiment's model."""
EXPERIMENTS = (
    *(Experiment(f"wmt14-ende-{n}l", "WMT'14 En-De", n, n, 1e-3, 8000, 32_768) for n in (6, 12, 18, 100)),
    Experiment("wmt14-enfr-60l", "WMT'14 En-Fr", 60, 12, 7e-4, 8000, 1_280_000),
)

FAILED = {"post-ln": ((12, 12), (18, 18), (60, 12))}
"""Where the papers' tables have no score for a scheme: its training diverged."""
COMPARED = ("admin", "pre-ln", "post-ln")
"""The schemes of those tables; at every depth the first has the best score."""
TABLES = "Liu et al. 2020, tables of WMT'14 (recipes/papers.csv)"


class Line(NamedTuple):
    """One piece of advice."""

    what: str
    advice: str
    basis: str


def variances(encoder_layers: int, decoder_layers: int) -> dict[str, list[float]]:
    """Var[f_i] of every sub-layer of each stack that there is."""
    decoder = DECODER if encoder_layers else DECODER[::2]  # a language model has no encoder-attention
    stacks = {"encoder": list(ENCODER) * encoder_layers, "decoder": list(decoder) * decoder_layers}
    return {side: branches for side, branches in stacks.items() if branches}


def output_change(scheme: str, side: str, branches: list[float]) -> float | None:
    """Σ β²_{i,i} of a stack at initialisation; None where a scheme's branches were not measured."""
    if scheme not in (*COMPARED, "post-ln-pre-ln"):
        return None
    norm = SCHEMES[scheme].norm[side == "decoder"]
    if norm == "after" and not SCHEMES[scheme].omega:
        return sum(v / (1 + v) for v in branches)
    return sum(v / (1 + sum(branches[: i + 1])) for i, v in enumerate(branches))


def nearest(encoder_layers: int, decoder_layers: int) -> Experiment | None:
    """The papers' experiment whose depths are nearest, as ratios; none for a model of one stack."""

    def distance(paper: Experiment) -> float:
        ratios = (paper.encoder_layers / encoder_layers, paper.decoder_layers / decoder_layers)
        return sum(abs(math.log(ratio)) for ratio in ratios)

    return min(EXPERIMENTS, key=distance) if encoder_layers and decoder_layers else None


def _stability(scheme: str, encoder_layers: int, decoder_layers: int) -> Iterator[Line]:
    shallow = variances(6 if encoder_layers else 0, 6 if decoder_layers else 0)
    for side, branches in variances(encoder_layers, decoder_layers).items():
        what = f"output change, {side}"
        change = output_change(scheme, side, branches)
        if change is None:
            yield Line(what, "not measured", f"no profile of {SCHEMES[scheme].title} at hand")
            continue
        post_ln, six_layers = (output_change("post-ln", side, values) for values in (branches, shallow[side]))
        text = f"{change:.2f} C" + ("" if scheme == "post-ln" else f"; with Post-LN {post_ln:.2f} C")
        basis = f"theorem 2 of Liu et al. 2020, at initialisation; {PROFILE}"
        yield Line(what, f"{text}; of a Post-LN of 6 layers, which trains, {six_layers:.2f} C", basis)


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
        for what in ("learning rate", "warm-up", "batch"):
            yield Line(what, "not measured", "the papers' experiments are translation, with two stacks")
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
    """What is known about training such a model.

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
    lines += _stability(scheme, encoder_layers, decoder_layers)
    lines += _optimisation(nearest(encoder_layers, decoder_layers), width)
    basis = "the authors' runs; profiling computes in float32 in any. bf16, on cards that have it: not compared here"
    lines.append(Line("precision", "--fp16 --threshold-loss-scale 0.03125", basis))
    lines.append(Line("while it trains", "--admin-monitor 100", "warns of signs of divergence: docs/monitor.md"))
    return lines


def table(lines: list[Line]) -> str:
    """For people: what, advice, and below it the basis."""
    left = max(len(line.what) for line in lines) + 2
    wrapped = textwrap.TextWrapper(100, subsequent_indent=" " * left, break_long_words=False, break_on_hyphens=False)
    text = ""
    for what, advice, basis in lines:
        for start, content in ((what, advice), ("", f"({basis})")):
            wrapped.initial_indent = start.ljust(left)
            text += f"{wrapped.fill(content)}\n"
    return text


def as_dict(lines: list[Line]) -> dict[str, Any]:
    """For machines."""
    return {line.what: {"advice": line.advice, "basis": line.basis} for line in lines}
