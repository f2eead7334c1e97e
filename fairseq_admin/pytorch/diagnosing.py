"""The smallest change that lets a new model learn: a warm-up, Admin, another rate, or none. Short trials on copies.

Trials are compared with a *blind* copy, whose stacks end in a constant: it learns how often each target occurs and no
more, which is the plateau. They go by successive halving: every setting for n steps; of each kind of setting the better
half of its rates for 2n, and of these the better half for 4n. Once a trial has left the plateau, only smaller changes
than its setting are tried further. This says what leaves the plateau, never what ends best.
"""

from __future__ import annotations

import copy
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn

from ..bar import bar
from ..errors import AdminError
from .attaching import attach, attached
from .profiling import profile
from .trace import by_name, is_norm, undisturbed

KINDS = [(None, False), (None, True), ("constant", True), ("log", True), ("reference", True)]
"""A rule, or None for the model as it is; and whether the rate warms up, for a quarter of the steps."""
LENGTHS = (1, 2, 4)
SHARE = 0.1
"""How much of the planned run all trials may take together."""
FEWEST = 8  # steps of a trial
LEAVES, STAYS = 0.1, 0.02
"""A trial this far below the plateau's loss, as a share of it, has left it; one nearer than that is still on it."""
LARGE = 0.1  # a change of a matrix by two steps, as a share of its norm

Loss = Callable[[nn.Module, Any], Tensor]
Setting = tuple[str | None, bool, float]  # rule, warm-up, rate


@dataclass(frozen=True)
class Trial:
    """The longest trial of a setting; its loss is the mean over the last quarter of the steps.

    Its status is *learns*, *fails* (diverged, or on the plateau after the longest trial) or *undecided in N steps*.
    """

    rule: str | None
    rate: float
    warm_up: int
    steps: int
    loss: float
    status: str

    def __str__(self) -> str:
        numbers = f"{self.rate:8g} {self.warm_up:8} {self.steps:6} {self.loss:9.4g}"
        return f"{self.rule or 'as it is':9} {numbers}  {self.status}"


@dataclass(frozen=True)
class Diagnosis:
    """Trials, the smallest change first; the loss of the plateau; what else was seen in the model."""

    trials: list[Trial]
    plateau: float
    seen: list[str]

    @property
    def advice(self) -> str:
        """The smallest change that leaves the plateau, in one sentence; or what to try next."""
        longest = max(trial.steps for trial in self.trials)
        best = next((trial for trial in self.trials if trial.status == "learns"), None)
        if best is None and all(trial.status == "fails" for trial in self.trials if trial.steps == longest):
            return f"No omega helped in {longest} steps: take Pre-LN or a lower rate, or diagnose with more steps."
        if best is None:
            return f"Undecided in {longest} steps: some settings begin to learn. Diagnose with more steps."
        if best is self.trials[0]:
            return "It learns as it is."
        admin = f"omega by the rule {best.rule}, " if best.rule else ""
        warm_up = f", {best.warm_up} steps of warm-up" if best.warm_up else ""
        return f"It does not learn as it is, but with this it does: {admin}a rate of {best.rate:g}{warm_up}."

    def __str__(self) -> str:
        head = f"{'rule':9} {'rate':>8} {'warm-up':>8} {'steps':>6} {'loss':>9}"
        blind = f"{'blind':9} {self.plateau:34.4g}  the plateau"
        return "\n".join([head, *map(str, self.trials), blind, *self.seen, self.advice])


@dataclass
class Trainer:
    """Trains copies of a model, each on the same batches and from the same random state."""

    model: nn.Module
    batches: Iterable[Any]
    loss: Loss
    optimizer: Callable[..., torch.optim.Optimizer]
    step_done: Callable[[], object] = int

    def copy(self, rule: str | None = None) -> nn.Module:
        """A copy of the model in training mode, attached by a rule with what its forward takes of the first batch."""
        model, calls = copy.deepcopy(self.model).train(), []
        if rule is None:
            return model
        keep = model.register_forward_pre_hook(lambda *call: calls.append(by_name(*call)), with_kwargs=True)
        with undisturbed(model):
            self.loss(model, next(iter(self.batches)))
        keep.remove()
        if not calls:
            raise AdminError("loss(model, batch) did not call the model that it was given; expected model(...) in it.")
        attach(model, **calls[0], omega="profile" if rule == "reference" else rule)
        if rule == "reference":
            profile(model, **calls[0], rule=rule)
        return model

    def train(self, model: nn.Module, rate: float, warm_up: int, steps: int) -> float:
        """Train a copy. Returns the mean loss of the last quarter of the steps; infinity if it is not finite."""
        losses: list[float] = []
        devices = {parameter.device for parameter in model.parameters() if parameter.is_cuda}
        with torch.random.fork_rng(list(devices)), torch.enable_grad():
            optimizer = self.optimizer(model.parameters(), rate)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / max(1, warm_up)))
            for batch in itertools.islice(itertools.chain.from_iterable(itertools.repeat(self.batches)), steps):
                optimizer.zero_grad()
                value = self.loss(model, batch)
                losses.append(value.item())
                if not math.isfinite(losses[-1]):
                    return math.inf
                value.backward()
                optimizer.step()
                schedule.step()
                self.step_done()
        return mean(losses[-max(1, steps // 4) :])

    def blind(self, last_norms: list[str]) -> nn.Module:
        """A copy in which the last norm of each stack reads one constant vector, at all positions of all batches."""
        model = self.copy()
        constants: dict[nn.Module, Tensor] = {}

        def replace(norm: nn.Module, args: tuple) -> tuple:
            constant = constants.setdefault(norm, args[0].detach().flatten(0, -2).mean(0))
            return constant.expand_as(args[0]), *args[1:]

        for name in last_norms:
            model.get_submodule(name).register_forward_pre_hook(replace)
        return model


def settings(rates: Sequence[float]) -> list[Setting]:
    """All that is tried, the smallest change first: at the first rate, then at lower ones, then at higher ones."""
    others = sorted(rates[1:], key=lambda rate: (rate > rates[0], abs(math.log(rate / rates[0]))))
    return [(rule, warms_up, rate) for rate in [rates[0], *others] for rule, warms_up in KINDS]


def better_rates(alive: list[Setting], trials: dict[Setting, Trial], keep: int) -> list[Setting]:
    """The first setting and, of each kind, those at its best rates."""
    better = {s: sum(o[:2] == s[:2] and trials[o].loss < trials[s].loss for o in alive) for s in alive}
    return [setting for setting in alive if setting is alive[0] or better[setting] < keep]


def look(trainer: Trainer, rate: float) -> tuple[list[str], list[str], float]:
    """The last norm of each stack; what may keep the model, or omega, from working; the seconds of a step."""
    model, seen = trainer.copy(), []
    stacks = [[site.name for site in stack] for stack in attached(trainer.copy("constant"))[1].stacks]
    if single := [stack[0] for stack in stacks if len(stack) == 1]:
        seen.append(f"Stacks of one sub-layer, where omega is 1: {', '.join(single)}.")
    norms = [name for name, module in model.named_modules() if is_norm(module, torch.ones(1))]
    if skipped := [name for name in norms if name not in itertools.chain(*stacks)]:
        seen.append(f"Norms without omega, as no sum x + f(x) is read by them alone: {', '.join(skipped)}.")
    before = {name: w.detach().clone() for name, w in model.named_parameters() if w.dim() > 1 and w.any()}
    same: dict[Any, list[str]] = {}
    for name, weight in before.items():
        same.setdefault((weight.shape, weight.double().norm().item()), []).append(name)
    copies = max(same.values(), key=len)
    if len(copies) > 1:
        seen.append(f"Copies of one another: {', '.join(copies[:2])}, …: draw each layer, as nn.Transformer does.")
    times = [time.monotonic()]
    trainer.step_done = lambda: times.append(time.monotonic())
    trainer.train(model, rate, 0, 2)
    changes = {name: ((model.get_parameter(name) - w).norm() / w.norm()).item() for name, w in before.items()}
    worst = max(changes, key=changes.__getitem__)
    if changes[worst] > LARGE:
        share = f"{changes[worst]:.0%}"
        seen.append(f"Two steps at {rate:g} change {worst} by {share}: its weights are small for this rate.")
    return [stack[-1] for stack in stacks], seen, times[-1] - times[-2]


def diagnose(
    model: nn.Module, batches: Iterable[Any], *, loss: Loss, optimizer: Callable[..., torch.optim.Optimizer],
    rates: Sequence[float], steps: int,
) -> Diagnosis:  # fmt: skip
    """Try, on copies, which smallest change lets a new model leave the plateau. The model stays as it is.

    Args:
        model: not attached, and not trained yet.
        batches: of the training: a list or a DataLoader, which every trial reads from its beginning.
        loss: the loss of a batch, by calling the model that it is given: loss(model, batch).
        optimizer: optimizer(parameters, lr).
        rates: learning rates to try, yours first.
        steps: of the run that you plan; the trials take a tenth of them at most, all together.

    Raises:
        AdminError: too few steps for so many rates; what `attach` and `profile` refuse (Pre-LN, a trained model).
    """
    if iter(batches) is batches:
        raise AdminError("batches can be read only once; expected a list or a DataLoader, for every trial reads it.")
    keep = [math.ceil(len(rates) / length) for length in LENGTHS]
    parts = sum((len(KINDS) * count + 1) * length for count, length in zip(keep, LENGTHS)) + LENGTHS[-1]
    unit = int(steps * SHARE - 2) // parts
    if unit < FEWEST:
        least = math.ceil((FEWEST * parts + 2) / SHARE)
        raise AdminError(f"steps={steps} leaves {unit} steps a trial; expected steps={least} or more, or fewer rates.")
    trainer = Trainer(model, batches, loss, optimizer)
    last_norms, seen, seconds = look(trainer, rates[0])
    minutes = unit * parts * seconds / 60
    print(f"diagnose: at most {unit * parts} steps of {seconds:.2g} s, {minutes:.1f} minutes", file=sys.stderr)
    alive = settings(rates)
    trials: dict[Setting, Trial] = {}
    with bar("trials", unit * parts, " steps", speaker="diagnose: ") as shown:
        trainer.step_done = shown.update
        plateau = trainer.train(trainer.blind(last_norms), max(rates), 0, unit * LENGTHS[-1])
        leaves, stays = (plateau - share * abs(plateau) for share in (LEAVES, STAYS))
        for count, length in zip([*keep[1:], 1], LENGTHS):
            n = unit * length
            for i, (rule, warms_up, rate) in enumerate(alive):
                warm_up = n // 4 if warms_up else 0
                value = trainer.train(trainer.copy(rule), rate, warm_up, n)
                fails = value == math.inf or (value > stays and length == LENGTHS[-1])
                status = "learns" if value <= leaves else "fails" if fails else f"undecided in {n} steps"
                trials[alive[i]] = Trial(rule, rate, warm_up, n, value, status)
                if value <= leaves:
                    alive = alive[:i]
                    break
            alive = better_rates(alive, trials, count)
    return Diagnosis([trials[setting] for setting in settings(rates) if setting in trials], plateau, seen)
