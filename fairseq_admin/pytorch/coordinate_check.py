"""A coordinate check: does an update move the output of a deep model as much as that of a shallow one?

    |F(x, W*) - F(x, W)| ∝ S^e      F: the output of the last norm with ω; W*: the weights after a few updates

S is the number of sub-layers of the deepest stack. Adam changes each weight by about the learning rate, and the changes
of S sub-layers point the same way, so they move F by about rate · S / ω. If e is about 0, a rate that is tuned at one
depth can serve at every depth; if it is 1, as with ω = 1, twice the depth needs half the rate. The check is that of
Yang et al. 2022 (Tensor Programs V, appendix D.1), with the depth in place of the width.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import AdminError
from .attaching import attach, attached
from .batch import as_batch, call, forward_call
from .trace import tensors

SATURATES = 0.5
"""From this change on, the output is another one rather than a moved one. (Two independent outputs differ by 1.4.)"""


@dataclass(frozen=True)
class CoordinateCheck:
    """The result of `coordinate_check`. `print` shows it as a table."""

    sublayers: list[int]
    """S of the models, in increasing order."""
    changes: dict[str, list[float]]
    """The root mean square of F(x, W*) - F(x, W), as a share of that of F(x, W), by rule: a number for each S."""

    @property
    def exponents(self) -> dict[str, float]:
        """e by rule, from a line through the logarithms of S and of the change."""
        logs = [math.log(count) for count in self.sublayers]
        lines = {rule: [math.log(change) for change in changes] for rule, changes in self.changes.items()}
        return {rule: statistics.linear_regression(logs, line).slope for rule, line in lines.items()}

    def __str__(self) -> str:
        rows = [f"{'omega':10} {'exponent':>8}  change of the output at S ="]
        rows[0] += " ".join(f"{count:>8}" for count in self.sublayers)
        for (rule, changes), exponent in zip(self.changes.items(), self.exponents.values()):
            rows.append(f"{rule:10} {exponent:8.2f}{'':29}" + " ".join(f"{change:8.3g}" for change in changes))
        if max(max(changes) for changes in self.changes.values()) > SATURATES:
            rows.append(f"A change above {SATURATES} grows no more as S^e: take a lower rate, for a better exponent.")
        return "\n".join(rows)

    def draw(self, path: str | Path) -> None:
        """Draw the change against S, a line for each rule, with logarithmic axes. Needs matplotlib.

        Args:
            path: the file to write; its ending says the format (.png, .svg, .pdf).
        """
        from matplotlib.figure import Figure

        drawn = Figure(figsize=(5, 3.2), layout="constrained")
        axes = drawn.subplots()
        for number, (rule, changes) in enumerate(self.changes.items()):
            label = f"omega {rule}: S^{self.exponents[rule]:.2f}"
            axes.loglog(self.sublayers, changes, marker="osD^vPX"[number % 7], label=label)
        axes.set_xticks(self.sublayers, [str(count) for count in self.sublayers], minor=False)
        axes.set_xticks([], minor=True)
        axes.set(xlabel="sub-layers S", ylabel="change of the output, as a share of it")
        axes.legend(frameon=False)
        drawn.savefig(path)


def output_of(model: nn.Module, batch: Any) -> Tensor:
    """The output of the last norm with ω, in evaluation mode. In float64, of any shape."""
    outputs: list[Tensor] = []
    norm = model.get_submodule(attached(model)[1].norms[-1])
    hook = norm.register_forward_hook(lambda _, args, output: outputs.append(tensors(output)[0]))
    model.eval()
    with torch.no_grad():
        call(model, batch)
    hook.remove()
    model.train()
    return outputs[-1].double()


def coordinate_check(
    build: Callable[[int], nn.Module], batches: Iterable[Any], *, loss: Callable[[nn.Module, Any], Tensor],
    depths: Sequence[int], rate: float, rules: Sequence[str | float] = (1, "constant", "linear"),
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.Adam, seed: int = 1,
) -> CoordinateCheck:  # fmt: skip
    """Measure how much a few updates change a Post-LN model's output, by depth and rule for ω.

    No state of the caller changes: random states are restored afterwards.

        >>> def build(depth):
        ...     layers = [torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0) for _ in range(depth)]
        ...     return torch.nn.Sequential(torch.nn.Embedding(8, 16), *layers, torch.nn.Linear(16, 8))
        >>> check = admin.coordinate_check(
        ...     build,
        ...     [torch.randint(8, (4, 5)) for _ in range(5)],
        ...     loss=lambda model, ids: torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()),
        ...     depths=[2, 4, 8],
        ...     rate=1e-3,
        ... )
        >>> check.sublayers, list(check.exponents)
        ([4, 8, 16], ['1', 'constant', 'linear'])

    Args:
        build: build(depth) returns a new model, not attached.
        batches: one update each; five are enough. F is measured on the first.
        loss: loss(model, batch) calls that model and returns the loss of the batch.
        depths: two or more, increasing, in the unit of `build`; each doubling the last is a good choice.
        rate: learning rate; take yours.
        rules: ω as `attach` takes it.
        optimizer: optimizer(parameters, lr) returns an optimizer.
        seed: of the initial weights and of dropout, the same for every model.

    Returns:
        The changes, and the exponent e of each rule.

    Raises:
        AdminError: fewer than two depths, or models of equal depth; a change that is 0 or not finite; what `attach`
            refuses.
    """
    batches = list(batches)
    sublayers: dict[int, int] = {}
    changes: dict[str, list[float]] = {str(rule): [] for rule in rules}
    for depth in depths:
        for rule in rules:
            with torch.random.fork_rng(), torch.enable_grad():
                torch.manual_seed(seed)
                model = build(depth).train()
                batch = as_batch(model, *forward_call(model, batches[0], loss))
                attach(model, batch, omega=rule, unfoldable="keep")
                before = output_of(model, batch)
                updates = optimizer(model.parameters(), lr=rate)
                for each in batches:
                    updates.zero_grad()
                    loss(model, each).backward()
                    updates.step()
                change = ((output_of(model, batch) - before).norm() / before.norm()).item()
            if not 0 < change < math.inf:
                raise AdminError(f"omega {rule} at depth {depth}: the output changed by {change}; give another rate.")
            changes[str(rule)].append(change)
            sublayers[depth] = max(attached(model)[1].stacks.values())
    counts = list(sublayers.values())
    if len(counts) < 2 or sorted({*counts}) != counts:
        raise AdminError(f"models of {counts} sub-layers; expected two or more, each deeper than the last (depths=).")
    return CoordinateCheck(counts, changes)
