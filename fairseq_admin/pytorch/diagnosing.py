"""Short trials find the smallest change with which a new model learns: none, a warm-up, Admin, or another rate.

The plateau is the loss of a *blind* copy, in which every norm of a stack reads a constant: it learns how often each
target occurs, and nothing else. A trial's *gain* is its distance below the plateau; but a decoder has to read its
source, so it is at most what the loss rises by with the source of another row. What looks like learning may be chance,
so it has to be seen again from other initial weights, on other batches. The result says which settings leave the
plateau, not which one ends best; but a smaller change has to gain half as much as a larger one.
"""

from __future__ import annotations

import copy
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, repeat
from statistics import mean, pstdev
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map

from ..core.undisturbed import undisturbed
from ..errors import AdminError
from .attaching import attach, attached, unfoldable
from .batch import as_batch, forward_call
from .branches import Search, grouped, stacks_of
from .sums import is_norm, origin
from .trace import Graph, floating, leaf_of, tensors, with_leaf

RULES = ("linear", "constant")
CHANGES = {"as it is": "", "warm-up": "", "redrawn": "each layer drawn by itself, "}
CHANGES |= {rule: f"omega by the rule {rule}, " for rule in RULES}
"""From the smallest, in words. All but the first warm the rate up during a quarter of the steps."""
SHARE, TRIALS = 0.1, 10
"""The share of the planned run that all trials together may take, and their number: the blind copy's, settings and
repetitions, and two on a single batch if nothing else moves."""
LEAST, LOOK = 1000, 6  # steps of a run, at least; steps of the first look
LEAVES, NOISES, STAYS = 0.1, 2, 0.2
"""A trial has left the plateau if its gain is more than LEAVES of the plateau's loss and than NOISES standard
deviations of that loss between batches. It has not moved if its gain is less than STAYS of this distance."""
LARGE, UNIT = 0.1, (1e-3, 5.0)
"""Change of a matrix in two steps, as a share of its norm; mean magnitudes that are not far from 1."""


@dataclass
class Trial:
    """The trial of a change at one rate. The loss is the mean over the last quarter of its steps.

    The status is *learns* (it left the plateau, and so did the repetition), *fails* (it diverged, or did not move),
    or *undecided*. After a repetition, loss and gain are the worse ones.
    """

    change: str
    rate: float
    warm_up: int = 0
    steps: int = 0
    loss: float = -math.inf
    gain: float = math.inf
    status: str = ""

    @property
    def rule(self) -> str | None:
        """The rule of ω; None without ω."""
        return self.change if self.change in RULES else None

    def __str__(self) -> str:
        return f"{self.change:9} {self.rate:8g} {self.warm_up:8} {self.steps:6} {self.loss:9.4g}  {self.status}"


@dataclass(frozen=True)
class Diagnosis:
    """The trials, smallest change first; the loss of the plateau; observations about the model; and the advice.

    The advice is the smallest change that leaves the plateau, or else what to do first, and what that would cost.
    """

    trials: list[Trial]
    plateau: float
    seen: list[str]
    advice: str

    def __str__(self) -> str:
        head = f"{'change':9} {'rate':>8} {'warm-up':>8} {'steps':>6} {'loss':>9}"
        blind = f"{'blind':9} {self.plateau:34.4g}  the plateau"
        return "\n".join([head, *map(str, self.trials), blind, *self.seen, self.advice])


def constant(x: Any) -> Any:
    """One fixed vector at all places of all rows; of integers, zeros."""
    if floating(x) and x.dim():
        return torch.linspace(-1, 1, x.shape[-1]).to(x).expand_as(x)
    return torch.zeros_like(x) if isinstance(x, Tensor) and x.dtype != torch.bool else x


def other_row(x: Tensor) -> Tensor:
    """Each row's numbers from another row, one place further: either rows or places come first."""
    axes = (0, 1)[: x.dim() - x.is_floating_point()]
    return x.roll((1,) * len(axes), axes)


class Trainer:
    """Trains copies of a model from the same random state."""

    def __init__(self, model: nn.Module, batches: Any, loss: Any, optimizer: Any, step_done: Any = int) -> None:
        """step_done() is called after each step."""
        self.models, self.batches, self.loss, self.step_done = {"": model}, batches, loss, step_done
        self.optimizer = optimizer
        with undisturbed(model):  # a DataLoader draws a random number
            self.first = next(iter(batches))
        self.call = forward_call(self.copy(), self.first, loss)
        self.batch = as_batch(model, *self.call)
        """The arguments that the loss gives to the model's forward for the first batch."""
        self.models |= {rule: attach(self.copy(), self.batch, omega=rule, unfoldable="keep") for rule in RULES}
        self.record = attached(self.models[RULES[0]])[1]
        self.stacks = stacks_of(Search(Graph(self.copy(), self.batch)).sublayers)

    def copy(self, change: str = "as it is", repetition: bool = False) -> nn.Module:
        """A copy of the model in training mode, with a change. A repetition has other initial weights of the same law.

        Each matrix has its columns permuted, each vector its entries. Tensors of one size get one permutation, so that
        layers which start as copies stay copies, unless the change is that they do not.
        """
        source = self.models[change if change in RULES else ""]
        # Tensors with a gradient that modules keep, such as attention weights, cannot be copied.
        kept = [x for module in source.modules() for x in tensors(vars(module)) if not x.is_leaf]
        model = copy.deepcopy(source, {id(x): x.detach() for x in kept}).train()
        for number, weight in enumerate(model.parameters() if repetition or change == "redrawn" else ()):
            if weight.requires_grad and weight.dim():
                seed = 2 * (number if change == "redrawn" else weight.numel()) + repetition
                axis, seeded = min(1, weight.dim() - 1), torch.Generator().manual_seed(seed)
                order = torch.randperm(weight.shape[axis], generator=seeded).to(weight.device)
                weight.data.copy_(weight.data.index_select(axis, order))
        return model

    def blind(self) -> nn.Module:
        """A copy in which the norm of every sub-layer reads one fixed vector, at all places of all batches."""
        model = self.copy()
        for name in self.record.norms:
            model.get_submodule(name).register_forward_pre_hook(lambda _, *x: tree_map(constant, x), with_kwargs=True)
        return model

    def train(self, model: nn.Module, rate: float, warm_up: int, steps: int, skip: int = 0) -> list[float]:
        """Train a copy on the batches after the first `skip`.

        Returns the losses of the last quarter of the steps; [inf] if a loss is not finite.
        """
        losses: list[float] = []
        with undisturbed(model), torch.enable_grad():
            optimizer = self.optimizer(model.parameters(), rate)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / max(1, warm_up)))
            for batch in islice(chain.from_iterable(repeat(self.batches)), skip, skip + steps):
                optimizer.zero_grad()
                value = self.loss(model, batch)
                losses.append(value.item())
                value.backward()
                optimizer.step()
                schedule.step()
                self.step_done()
        return losses[-max(1, steps // 4) :] if math.isfinite(sum(losses)) else [math.inf]

    def worth(self, model: nn.Module) -> float:
        """By how much the loss rises with the source of another row. Of all sources the least, infinity without one.

        A source is an input that the first norm of the last stack does not read, as that of a decoder, which reads the
        words before. (It need not read those.) A mask, with its two numbers, is no source.
        """
        data = [(place, x) for place, x in enumerate(tree_leaves(self.call)) if isinstance(x, Tensor) and x.dim() > 1]
        places = [place for place, x in data if len(x.unique()) > 2 and min(x.shape[:2]) > 1]
        losses, wrote, norm = [], list[Any](), model.get_submodule(self.stacks[-1][0].name)
        for place in (-1, *places):
            swap = lambda _, *x, at=place: x if at < 0 else with_leaf(x, at, other_row(leaf_of(x, at)))  # noqa: E731
            with undisturbed(model) as undo:  # and the same dropout each time
                undo.callback(model.register_forward_pre_hook(swap, with_kwargs=True).remove)
                undo.callback(norm.register_forward_hook(lambda *call: wrote.append(tensors(call[-1])[0])).remove)
                losses.append(mean(self.loss(model, batch).item() for batch in islice(self.batches, 4)))
        same = [torch.equal(wrote[0], other) for other in wrote[:: len(wrote) // len(losses)]]
        return min((loss - losses[0] for loss, unread in zip(losses[1:], same[1:]) if unread), default=math.inf)


def copies(model: nn.Module) -> list[str]:
    """The names of two matrices that have the same entries, but for their order; [] if there are none."""
    norms = {name: (w.shape, w.norm().item()) for name, w in model.named_parameters() if w.dim() > 1 and w.any()}
    return sorted((n for n in norms if list(norms.values()).count(norms[n]) > 1), key=lambda n: str(norms[n]))[:2]


def look(trainer: Trainer, rate: float) -> tuple[list[str], dict[str, str], float, float]:
    """Train a copy for some steps at the full rate.

    Returns observations; what may explain that the model does not learn, by name; the rate at which two steps change no
    matrix by more than LARGE; and the seconds per step.
    """
    model, record = trainer.copy(), trainer.record
    seen = [f"Admin is off: {grouped(record.off)}."] if record.off else []
    seen += [f"Layers start as copies ({', '.join(names)}, …)."] if (names := copies(model)) else []
    before = {name: w.detach().clone() for name, w in model.named_parameters() if w.dim() > 1 and w.any()}
    trainer.train(model, rate, 0, 2)
    changes = {name: ((model.get_parameter(name) - w).norm() / w.norm()).item() for name, w in before.items()}
    worst = max(changes, key=changes.__getitem__)
    calm = rate * LARGE / max(changes[worst], 1e-9)
    if calm < rate:
        seen.append(f"Two steps at {rate:g} change {worst} by {changes[worst]:.0%}: take a rate of {calm:.1g} or less.")
    dead = [name for name, w in model.named_parameters() if w.requires_grad and (w.grad is None or not w.grad.any())]
    # Heads and poolers may be idle, but not layers.
    causes = dict.fromkeys(dead if {n.rpartition(".")[0] for n in dead} & {*record.norms} else (), "gets no gradient")
    for path, x in tree_flatten_with_path(trainer.first)[0]:
        # A mask has two numbers.
        if floating(x) and len(x.unique()) > 2 and not UNIT[0] < (size := x.abs().mean().item()) < UNIT[1]:
            causes[f"batch{keystr(path)}"] = f"is far from unit scale (on average {size:.2g}): standardise it"
    shortcuts = {origin(x) for stack in trainer.stacks for sublayer in stack[1:] for x in sublayer.shortcut}
    if len(lost := {x.place[-1] for x in shortcuts if is_norm(x)} - {*record.norms}) > 1:
        causes |= dict.fromkeys(sorted(lost), "reads no sum x + f(x): a residual is missing")
    began = time.monotonic()
    trainer.train(model, rate, 0, LOOK - 2)
    return seen, causes, calm, (time.monotonic() - began) / (LOOK - 2)


def diagnose(
    model: nn.Module, batches: Iterable[Any], *, loss: Callable[[nn.Module, Any], Tensor],
    optimizer: Callable[..., torch.optim.Optimizer], rates: Sequence[float], steps: int,
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
        The trials (change, rule, rate, warm-up in steps, steps, loss, gain, status), the loss of the plateau, what else
        was seen, and `advice`. `print` shows them as one table. Losses and gains have the unit of `loss`.

    Raises:
        AdminError: too few steps for so many rates; what `attach` refuses even with unfoldable="keep" (Pre-LN, a
            trained model).
    """
    from ..bar import bar  # tqdm, which nothing else here needs

    if isinstance(batches, Iterator):
        raise AdminError("batches can be read only once; expected a list or a DataLoader, for every trial reads it.")
    if steps < LEAST:
        raise AdminError(f"steps={steps}; expected {LEAST} or more, since a trial takes a hundredth of them.")
    length = int(steps * SHARE - LOOK) // TRIALS
    with bar("trials", int(steps * SHARE), " steps", prefix="diagnose: ") as shown:
        trainer = Trainer(model, batches, loss, optimizer, shown.update)
        seen, causes, calm, seconds = look(trainer, rates[0])
        changes, spare = [change for change in CHANGES if change != "redrawn" or copies(model)], 2 if causes else 4
        trials = [Trial(change, rate) for rate in rates for change in changes if change not in RULES or not causes]
        trials.sort(key=lambda trial: bool(trial.rule) and trial.rate > calm)  # a lower rate is a smaller change
        most = shown.total = LOOK + length * min(TRIALS, len(trials) + spare)
        minutes = seconds / 60 * most
        cost = f"at most {most} steps, {most / steps:.0%} of {steps}, {minutes:.1f} minutes"
        shown.write(f"diagnose: {cost}; {5 * length * seconds / 60:.1f} if it learns as it is", sys.stderr)
        losses = trainer.train(trainer.blind(), max(rates), 0, length)
        if (plateau := mean(losses)) == math.inf:
            raise AdminError(f"at {max(rates):g} even a copy that reads nothing diverges; give lower rates.")
        leaves = max(LEAVES * plateau, NOISES * pstdev(losses))

        def leaves_it(trial: Trial, repetition: bool = False) -> bool:
            """Train a setting. A repetition can only make its loss and gain worse."""
            model, trial.warm_up = trainer.copy(trial.change, repetition), length // 4 * (trial.change != "as it is")
            loss = mean(trainer.train(model, trial.rate, trial.warm_up, length, length * repetition))
            gain = min(plateau - loss, trainer.worth(model) if plateau - loss > STAYS * leaves else math.inf)
            trial.steps, trial.loss, trial.gain = length, max(trial.loss, loss), min(trial.gain, gain)
            trial.status = "fails" if loss == math.inf or gain < STAYS * leaves and not repetition else "undecided"
            if gain < STAYS * leaves < plateau - loss:
                seen.append(f"{trial.change} at {trial.rate:g}: with another row's source, the loss is the same.")
            return trial.gain > max(leaves, best.gain / 2 if best else 0.0)  # less is no reason to prefer it

        linear, best, smaller = [trial for trial in trials if trial.rule == "linear"], None, trials
        for trial in sorted(trials, key=lambda trial: [*linear[:1], trials[0], *linear[1:2], trial].index(trial)):
            if trial in smaller and shown.n + length * (2 if best else spare) <= most:
                if leaves_it(trial) and leaves_it(trial, repetition=True):
                    trial.status, best, smaller = "learns", trial, trials[: trials.index(trial)]
                shown.write(str(trial), file=sys.stderr)
        nearest = max(trials := [trial for trial in trials if trial.steps], key=lambda trial: trial.gain)
        if not best and not causes and nearest.gain < STAYS * leaves:
            trainer.batches, models = [trainer.first], (trainer.blind(), trainer.copy(RULES[0]))
            alone, learned = (mean(trainer.train(model, nearest.rate, length // 4, length)) for model in models)
            if not alone - learned > leaves:
                causes["A single batch"] = f"is not learned in {length} steps: check the data, the loss and the model"
    if best is trials[0]:
        advice = "It learns as it is."
    elif best:
        change = f"{CHANGES[best.change]}a rate of {best.rate:g}, {best.warm_up} steps of warm-up"
        advice = f"In {length} steps it learned little or nothing as it is, but did with {change}."
        if best.rule and (kept := unfoldable(trainer.models[best.rule])):
            advice += f' Give attach unfoldable="keep": {kept}.'
    elif causes:
        advice = f"It did not learn, and omega is no remedy. First: {grouped(causes)}."
    else:
        begins = f"Undecided: {nearest.change} at {nearest.rate:g} begins to learn"
        more, what = (1.5 * leaves / nearest.gain, begins) if nearest.gain > STAYS * leaves else (2, "No omega helped")
        cost = f"steps={math.ceil(more * steps)}: {more * length:.0f} a trial, {more * minutes:.1f} minutes"
        advice = f"{what} in {length} steps. Take Pre-LN or a lower rate, or diagnose with {cost}."
    return Diagnosis(trials, plateau, [*seen, *(f"{line}." for line in grouped(causes).split("; ") if line)], advice)
