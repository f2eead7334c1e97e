"""The coordinate check on a small language model of torch's layers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fairseq_admin.errors import AdminError
from fairseq_admin.pytorch.coordinate_check import CoordinateCheck, coordinate_check

WIDTH, WORDS = 32, 50


def build(depth: int) -> nn.Module:
    layers = [nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0) for _ in range(depth)]
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH), *layers, nn.Linear(WIDTH, WORDS))


def loss(model: nn.Module, words: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(words).flatten(0, 1), words.roll(1, 1).flatten())


def batches(count: int = 5) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(WORDS, (8, 16), generator=generator) for _ in range(count)]


def test_exponents_by_rule() -> None:
    """Law: five updates by Adam move the output as S / omega: as S, as its root, or as much at every depth.

    Measured: 1.47, 0.64 and 0.12. (Above 1 for omega = 1, because the output also moves more with each update.)
    """
    check = coordinate_check(build, batches(), loss=loss, depths=[3, 6, 12, 24], rate=1e-4)
    assert check.sublayers == [6, 12, 24, 48]
    assert check.exponents["1"] > 0.8
    assert 0.4 < check.exponents["constant"] < 0.75
    assert abs(check.exponents["linear"]) < 0.2


def test_one_update_by_hand() -> None:
    """Reference: the change of one update by SGD, in a model of two layers, with the same seed and omega = 1."""
    words = batches(1)
    sgd = torch.optim.SGD
    check = coordinate_check(build, words, loss=loss, depths=[1, 2], rate=0.1, rules=[1], optimizer=sgd, seed=7)
    torch.manual_seed(7)
    model = build(2)
    stack = model[:-1]
    before = stack(words[0]).double()
    loss(model, words[0]).backward()
    with torch.no_grad():
        for weight in model.parameters():
            weight -= 0.1 * weight.grad
    change = (stack(words[0]).double() - before).norm() / before.norm()
    assert check.changes["1"][1] == pytest.approx(change.item(), rel=1e-3)


def test_callers_random_state_stays() -> None:
    state = torch.get_rng_state()
    coordinate_check(build, batches(1), loss=loss, depths=[1, 2], rate=1e-3, rules=["log"])
    assert torch.equal(torch.get_rng_state(), state)


def test_table_and_figure(tmp_path: Path) -> None:
    """By hand: four times S with twice the change is S to the power of 1/2; a saturated change is noted."""
    check = CoordinateCheck([4, 16], {"constant": [0.1, 0.2], "1": [0.2, 0.8]})
    assert check.exponents == {"constant": pytest.approx(0.5), "1": pytest.approx(1.0)}
    assert [line.split()[:2] for line in str(check).splitlines()[1:3]] == [["constant", "0.50"], ["1", "1.00"]]
    assert "lower rate" in str(check)
    pytest.importorskip("matplotlib")
    check.draw(tmp_path / "check.png")
    assert (tmp_path / "check.png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("options", "message"),
    [({"depths": [2]}, r"models of \[4\] sub-layers; expected two or more"),
     ({"depths": [2, 1]}, r"models of \[4, 2\] sub-layers"),
     ({"depths": [1, 2], "rate": 0.0}, "the output changed by 0.0"),
     ({"depths": [1, 2], "loss": lambda model, words: torch.zeros(())}, "did not call the model")],
)  # fmt: skip
def test_refusals(options: dict, message: str) -> None:
    with pytest.raises(AdminError, match=message):
        coordinate_check(build, batches(1), **{"loss": loss, "rate": 1e-3, "rules": [1], **options})
