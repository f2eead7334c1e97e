"""Short trials find the smallest change with which a new model learns: none, a warm-up, Admin, or another rate.

The plateau is the loss of a *blind* copy, in which every norm of a stack reads a constant: it learns how often each
target occurs, and nothing else. The trials use successive halving. Every setting, a kind of change at one rate, runs
for n steps. The better half of the rates of each kind runs for 2n steps, and the better half of that half runs for 4n.
A trial that leaves the plateau may do so by chance, so its setting then gets the longest trial, on other batches and
from other initial weights. If the repetition leaves the plateau too, only smaller changes are tried further. The result
says which settings leave the plateau, not which one ends best.
"""

from __future__ import annotations

import copy
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn

from ..core.undisturbed import undisturbed
from ..errors import AdminError
from .attaching import attach, attached
from .batch import by_name
from .branches import grouped
from .trace import tensors

KINDS = [(None, False), (None, True), ("constant", True), ("log", True)]
"""A rule, or None for the model as it is; and whether the rate warms up during a quarter of the steps."""
LENGTHS = (1, 2, 4)
SHARE = 0.1
"""The share of the planned run that all trials together may take."""
FEWEST = 8  # steps of a trial
LEAVES, STAYS = 0.1, 0.02
"""Shares of the plateau's loss: a trial lower by more than LEAVES has left the plateau, by less than STAYS has not."""
LARGE = 0.1  # change of a matrix in two steps, as a share of its norm

Loss = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True)
class Trial:
    """The longest trial of a setting. The loss is the mean over the last quarter of its steps.

    The status is *learns* (it left the plateau, and so did the repetition), *fails* (it diverged, or was on the plateau
    after the longest trial) or *undecided in N steps*. After a repetition, the loss is the higher one.
    """

    rule: str | None
    rate: float
    warm_up: int
    steps: int
    loss: float
    status: str

    def __str__(self) -> str:
        rule = self.rule or "as it is"
        return f"{rule:9} {self.rate:8g} {self.warm_up:8} {self.steps:6} {self.loss:9.4g}  {self.status}"


@dataclass(frozen=True)
class Diagnosis:
    """The trials, smallest change first; the loss of the plateau; other observations about the model."""

    trials: list[Trial]
    plateau: float
    seen: list[str]

    @property
    def advice(self) -> str:
        """The smallest change that leaves the plateau, or the next thing to try, in one sentence."""
        longest = max(trial.steps for trial in self.trials)
        best = next((trial for trial in self.trials if trial.status == "learns"), None)
        if best is self.trials[0]:
            return "It learns as it is."
        if best:
            change = f"{f'omega by the rule {best.rule}, ' if best.rule else ''}a rate of {best.rate:g}"
            return f"It did not learn as it is, but did with {change}, {best.warm_up} steps of warm-up."
        if all(trial.status == "fails" for trial in self.trials if trial.steps == longest):
            return f"No omega helped in {longest} steps: take Pre-LN or a lower rate, or diagnose with more steps."
        return f"Undecided in {longest} steps: some settings begin to learn. Diagnose with more steps."

    def __str__(self) -> str:
        head = f"{'rule':9} {'rate':>8} {'warm-up':>8} {'steps':>6} {'loss':>9}"
        blind = f"{'blind':9} {self.plateau:34.4g}  the plateau"
        return "\n".join([head, *map(str, self.trials), blind, *self.seen, self.advice])


class Trainer:
    """Trains copies of a model from the same random state."""

    step_done: Callable[[], object] = int
    """Called after each step."""

    def __init__(self, model: nn.Module, batches: Iterable[Any], loss: Loss, optimizer: Callable) -> None:
        self.model, self.batches, self.loss, self.optimizer = model, batches, loss, optimizer
        trial, calls = self.copy(), []
        trial.register_forward_pre_hook(lambda *call: calls.append(call), with_kwargs=True)
        with undisturbed(trial):
            loss(trial, next(iter(batches)))
        if not calls:
            raise AdminError("loss(model, batch) did not call the model that it was given; expected model(...) in it.")
        _, args, kwargs = calls[0]
        self.batch = {**by_name(model, args), **kwargs} if kwargs else args
        """The arguments that the loss gives to the model's forward for the first batch."""

    def copy(self, rule: str | None = None, redraw: bool = False) -> nn.Module:
        """A copy of the model in training mode, attached by a rule.

        redraw: permute the columns of each matrix, which gives other weights of the same initial distribution. Matrices
        of one size get one permutation, so layers that start as copies stay copies.
        """
        # Tensors with a gradient that modules keep, such as attention weights, cannot be copied.
        kept = [x for module in self.model.modules() for x in tensors(vars(module)) if not x.is_leaf]
        model = copy.deepcopy(self.model, {id(x): x.detach() for x in kept}).train()
        for weight in model.parameters() if redraw else ():
            if weight.dim() > 1 and weight.requires_grad:
                seeded = torch.Generator().manual_seed(weight.numel())
                order = torch.randperm(weight.shape[1], generator=seeded).to(weight.device)
                weight.data.copy_(weight.data[:, order])
        if rule:
            attach(model, self.batch, omega=rule)
        return model

    def train(self, model: nn.Module, rate: float, warm_up: int, steps: int, skip: int = 0) -> float:
        """Train a copy on the batches after the first `skip`.

        Returns the mean loss of the last quarter of the steps; infinity if a loss is not finite.
        """
        losses: list[float] = []
        devices = {parameter.device for parameter in model.parameters() if parameter.is_cuda}
        with torch.random.fork_rng(list(devices)), torch.enable_grad():
            optimizer = self.optimizer(model.parameters(), rate)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / max(1, warm_up)))
            batches = itertools.chain.from_iterable(itertools.repeat(self.batches))
            for batch in itertools.islice(batches, skip, skip + steps):
                optimizer.zero_grad()
                value = self.loss(model, batch)
                losses.append(value.item())
                if not math.isfinite(losses[-1]):
                    return math.inf
                value.backward()
                optimizer.step()
                schedule.step()
                self.step_done()
        return mean(losses[-(steps // 4) :])

    def blind(self) -> nn.Module:
        """A copy in which the norm of every sub-layer reads one fixed vector, at all positions of all batches."""
        model = self.copy("constant")

        def hide(axis: int, norm: nn.Module, args: tuple) -> tuple:
            ramp = torch.linspace(-1, 1, args[0].shape[axis]).to(args[0])
            return ramp.reshape(-1, *[1] * (-1 - axis)).expand_as(args[0]), *args[1:]

        for norm in map(model.get_submodule, attached(model)[1].norms):
            norm.register_forward_pre_hook(partial(hide, -2 if isinstance(norm, nn.BatchNorm1d) else -1))
        return model


def look(trainer: Trainer, rate: float) -> tuple[list[str], float]:
    """Observations that may explain why the model does not learn or ω does not help, and the seconds per step.

    Trains a copy for two steps at the full rate.
    """
    model, off = trainer.copy(), attached(trainer.copy("constant"))[1].off
    seen = [f"Admin is off: {grouped(off)}."] if off else []
    before = {name: w.detach().clone() for name, w in model.named_parameters() if w.dim() > 1 and w.any()}
    same: dict[Any, list[str]] = {}
    for name, weight in before.items():
        same.setdefault((weight.shape, weight.double().norm().item()), []).append(name)
    copies = max(same.values(), key=len)
    if len(copies) > 1:
        seen.append(f"Layers start as copies ({copies[0]}, {copies[1]}, …): draw each, as nn.Transformer does.")
    trainer.train(model, rate, 0, 1)
    began = time.monotonic()
    trainer.train(model, rate, 0, 1)
    seconds = time.monotonic() - began
    changes = {name: ((model.get_parameter(name) - w).norm() / w.norm()).item() for name, w in before.items()}
    worst = max(changes, key=changes.__getitem__)
    if changes[worst] > LARGE:
        seen.append(f"Two steps at {rate:g} change {worst} by {changes[worst]:.0%}: small weights for this rate.")
    return seen, seconds


def diagnose(
    model: nn.Module, batches: Iterable[Any], *, loss: Loss, optimizer: Callable[..., torch.optim.Optimizer],
    rates: Sequence[float], steps: int,
) -> Diagnosis:  # fmt: skip
    """Find, by trials on copies, the smallest change with which a new model leaves the plateau.

    The model stays as it is.

        >>> words, out = torch.nn.Embedding(8, 16), torch.nn.Linear(16, 8)
        >>> layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        >>> model = torch.nn.Sequential(words, torch.nn.LayerNorm(16), torch.nn.TransformerEncoder(layer, 1), out)
        >>> result = admin.diagnose(
        ...     model,
        ...     [torch.randint(8, (4, 5)) for _ in range(6)],
        ...     loss=lambda model, ids: torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()),
        ...     optimizer=lambda parameters, lr: torch.optim.Adam(parameters, lr=lr),
        ...     rates=[1e-2],
        ...     steps=20_000,
        ... )
        >>> result.advice
        'It learns as it is.'

    Args:
        model: not attached, and not trained yet.
        batches: the training's batches: a list or a DataLoader. Every trial reads them from the beginning, and a
            repetition reads on after its first trial.
        loss: loss(model, batch) calls that model and returns the loss of the batch.
        optimizer: optimizer(parameters, lr) returns an optimizer.
        rates: learning rates to try: yours first, then the others in order of preference.
        steps: number of steps of the run that you plan. All trials together take at most a tenth of them.

    Returns:
        The trials (rule, warm-up in steps, rate, steps, loss, status), the loss of the plateau, and `advice` in one
        sentence. `print` shows them as one table. Losses have the unit of `loss`.

    Raises:
        AdminError: too few steps for so many rates; what `attach` refuses (Pre-LN, a trained model).
    """
    from ..bar import bar  # tqdm, which nothing else here needs

    if isinstance(batches, Iterator):
        raise AdminError("batches can be read only once; expected a list or a DataLoader, for every trial reads it.")
    counts = [math.ceil(len(rates) / length) for length in LENGTHS]
    parts = sum((len(KINDS) * count + 1) * length for count, length in zip(counts, LENGTHS)) + 2 * LENGTHS[-1]
    unit = int(steps * SHARE - 2) // parts
    if unit < FEWEST:
        least = math.ceil((FEWEST * parts + 2) / SHARE)
        raise AdminError(f"steps={steps} leaves {unit} steps a trial; expected steps={least} or more, or fewer rates.")
    most, longest = unit * parts + 2, unit * LENGTHS[-1]
    settings = [(*kind, rate) for rate in rates for kind in KINDS]
    alive = list(range(len(settings)))
    trials: dict[int, Trial] = {}
    with bar("trials", most, " steps", prefix="diagnose: ") as shown:
        trainer = Trainer(model, batches, loss, optimizer)
        trainer.step_done = shown.update
        seen, seconds = look(trainer, rates[0])
        shown.write(f"diagnose: at most {most} steps of {seconds:.2g} s, {most * seconds / 60:.1f} minutes", sys.stderr)
        plateau = trainer.train(trainer.blind(), max(rates), 0, longest)
        if plateau == math.inf:
            raise AdminError(f"at {max(rates):g} even a copy that reads nothing diverges; give lower rates.")
        leaves, stays = (plateau - share * abs(plateau) for share in (LEAVES, STAYS))
        for length, next_count in zip(LENGTHS, [*counts[1:], 0]):
            for i in alive:
                rule, warms_up, rate = settings[i]
                run = unit * length
                if shown.n + run + longest > most:  # earlier repetitions have used up the steps
                    break
                first = last = trainer.train(trainer.copy(rule), rate, run // 4 * warms_up, run)
                if first <= leaves:
                    skip, run = run, longest
                    last = trainer.train(trainer.copy(rule, redraw=True), rate, run // 4 * warms_up, run, skip)
                fails = math.inf in (first, last) or (first > stays and run == longest)
                status = "learns" if last <= leaves else "fails" if fails else f"undecided in {run} steps"
                trials[i] = Trial(rule, rate, run // 4 * warms_up, run, max(first, last), status)
                shown.write(str(trials[i]), file=sys.stderr)
                if status == "learns":
                    alive = [other for other in alive if other < i]
                    break
            # A setting whose repetition has failed is dropped. Otherwise the user's own setting always goes on.
            go_on = [i for i in alive if i in trials and trials[i].steps < longest]
            by_loss = sorted(go_on, key=lambda i: trials[i].loss)
            best = [[i for i in by_loss if i % len(KINDS) == kind][:next_count] for kind in range(len(KINDS))]
            alive = sorted({*go_on[:1], *itertools.chain(*best)})
    return Diagnosis([trials[i] for i in sorted(trials)], plateau, seen)
