"""`diagnose`: trials on copies by successive halving, the plateau and the advice. The model does not change."""

from __future__ import annotations

import copy
import math
import re

import pytest
import torch
from post_ln import Stack, X, build
from torch import nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

import fairseq_admin.pytorch as admin
from fairseq_admin.pytorch import diagnosing

WORDS, WIDTH = 8, 16


class Model(nn.Module):
    """Predicts its own input words, through a Post-LN encoder with independently drawn layers."""

    def __init__(self, layers=2, norm_first=False, drawn=True):
        super().__init__()
        torch.manual_seed(1)
        self.words, self.norm, self.out = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True, norm_first=norm_first)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        for weight in self.encoder.parameters() if drawn else ():
            if weight.dim() > 1:
                nn.init.xavier_uniform_(weight)

    def forward(self, ids):
        return self.out(self.encoder(self.norm(self.words(ids) + self.words.weight[0])))


def loss(model, ids):
    return nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def adam(parameters, lr):
    return torch.optim.Adam(parameters, lr=lr)


BATCHES = [torch.randint(WORDS, (4, 5), generator=torch.Generator().manual_seed(seed)) for seed in range(6)]


def diagnose(model, rates=(1e-2,), steps=5000, **options):
    return admin.diagnose(
        model, BATCHES, **{"loss": loss, "optimizer": adam, "rates": rates, "steps": steps, **options}
    )


@pytest.fixture
def scripted(monkeypatch):
    """Replace trials by a function (rule, warm-up, rate, steps) -> loss; the plateau is 10.

    Returns the trials that ran. A repetition starts from other weights. It has the same loss, or, if given,
    the loss of `loss_of_repetition`.
    """
    trials = []

    def of(loss_of, loss_of_repetition=None):
        copy_by_rule, blind = diagnosing.Trainer.copy, diagnosing.Trainer.blind

        def named(name, redraw, model):
            model.named, model.redraw = name, redraw
            return model

        def train(trainer, model, rate, warm_up, steps, skip=0):
            for _ in range(steps):
                trainer.step_done()
            if steps == 1 or model.named == "blind":  # a trial of one step measures the cost
                return 10.0
            assert (skip > 0) is model.redraw
            trials.append((model.named, warm_up > 0, rate, steps))
            return (loss_of_repetition if model.redraw and loss_of_repetition else loss_of)(*trials[-1])

        monkeypatch.setattr(
            diagnosing.Trainer,
            "copy",
            lambda trainer, rule=None, redraw=False: named(rule, redraw, copy_by_rule(trainer, rule, redraw)),
        )
        monkeypatch.setattr(diagnosing.Trainer, "blind", lambda trainer: named("blind", False, blind(trainer)))
        monkeypatch.setattr(diagnosing.Trainer, "train", train)
        return trials

    return of


def test_the_model_is_as_it_was():
    model = Model()
    model.encoder.eval()
    model.kept = model(BATCHES[0])
    weights, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    modes = [module.training for module in model.modules()]
    data = DataLoader(torch.cat(BATCHES), batch_size=4, shuffle=True)
    admin.diagnose(model, data, loss=loss, optimizer=adam, rates=[1e-2], steps=5000)
    assert list(model.state_dict()) == list(weights)
    assert all(torch.equal(model.state_dict()[key], weight) for key, weight in weights.items())
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == modes


def test_a_shallow_model_learns_as_it_is():
    result = diagnose(Model(), steps=20000)
    assert result.advice == "It learns as it is." == str(result).splitlines()[-1]
    assert result.trials[0].rule is None and result.trials[0].warm_up == 0 and result.trials[0].status == "learns"
    # Eight words are equally likely: a model that reads nothing has loss ln 8.
    assert result.plateau == pytest.approx(math.log(WORDS), abs=0.15)


def test_a_blind_copy_reads_nothing_and_trains():
    trainer = diagnosing.Trainer(Model(4), BATCHES, loss, adam)
    blind = trainer.blind().eval()
    assert torch.equal(blind(BATCHES[0]), blind(BATCHES[1]))
    ones = [torch.full_like(batch, 3) for batch in BATCHES]
    trainer.batches = ones  # a constant target is learned without reading
    assert trainer.train(trainer.blind(), 1e-2, 0, 40) < 0.5


class ChannelsFirst(nn.Module):
    """A layer of a `Stack` in which channels come before positions."""

    def __init__(self):
        super().__init__()
        self.norm, self.convolution = nn.BatchNorm1d(8), nn.Conv1d(8, 8, 1)

    def forward(self, x):
        x = x.transpose(1, 2)
        return self.norm(x + self.convolution(x)).transpose(1, 2)


def test_a_blind_copy_knows_no_position_if_channels_come_first():
    out = diagnosing.Trainer(Stack(ChannelsFirst), [X], lambda model, x: model(x).sum(), adam).blind()(X)
    torch.testing.assert_close(out, out[:1, :1].expand_as(out))


def test_no_more_steps_than_a_tenth_and_no_more_than_are_said(capsys):
    calls = []

    def counted(model, ids):
        calls.append(torch.is_grad_enabled())
        return loss(model, ids) * 0 + 1.0  # nothing can be learned

    for rates in ([1e-2], [1e-2, 1e-3, 3e-3]):
        calls.clear()
        result = diagnose(Model(1), rates, 6000, loss=counted)
        assert 2 < sum(calls) <= 600
        said = int(capsys.readouterr().err.partition("at most ")[2].partition(" steps of ")[0])
        assert sum(calls) <= said <= 600
        assert {trial.status for trial in result.trials if trial.steps == result.trials[0].steps} == {"fails"}
        assert "No omega helped" in result.advice and "Pre-LN" in result.advice


def test_halving_keeps_the_better_rates_of_each_kind_and_the_users_own(scripted):
    ran = scripted(lambda rule, warms_up, rate, steps: 10 - (rate if rule or warms_up else -rate) / 10)
    result = diagnose(Model(), [2.0, 1.0, 4.0], 20000)
    shortest = min(steps for *_, steps in ran)
    assert {steps for *_, steps in ran} == {shortest, 2 * shortest, 4 * shortest}
    of = {length: [run[:3] for run in ran if run[3] == length * shortest] for length in (1, 2, 4)}
    kinds = [(rule, warms_up) for rule, warms_up in diagnosing.KINDS]
    assert of[1] == [(*kind, rate) for rate in (2.0, 1.0, 4.0) for kind in kinds]
    # Without warm-up, the lowest rate is best. The user's own setting continues, too.
    assert set(of[2]) == {(None, False, 2.0), (None, False, 1.0)} | {(*k, r) for k in kinds[1:] for r in (2.0, 4.0)}
    assert set(of[4]) == {(None, False, 2.0), (None, False, 1.0)} | {(*kind, 4.0) for kind in kinds[1:]}
    assert "Undecided" in result.advice


def test_only_smaller_changes_than_one_that_learns_go_on(scripted):
    ran = scripted(lambda rule, warms_up, rate, steps: 5 if rule == "constant" else math.inf if warms_up else 9.9)
    result = diagnose(Model(), [1.0, 0.5], 20000)
    shortest = ran[0][3]
    before = [(None, False, 1.0), (None, True, 1.0)]
    constant = ("constant", True, 1.0)  # and its repetition
    assert [run[:3] for run in ran] == [*before, constant, constant, *before, *before]
    assert [run[3] // shortest for run in ran] == [1, 1, 1, 4, 2, 2, 4, 4]
    assert [trial.status for trial in result.trials] == ["fails", "fails", "learns"]
    assert result.advice.startswith("It did not learn as it is, but did with omega by the rule constant, a rate of 1, ")
    rows = [line[:9].rstrip() for line in str(result).splitlines()[:5]]
    assert rows == ["rule", "as it is", "as it is", "constant", "blind"]


@pytest.mark.parametrize(
    ("learns", "advice"),
    [
        ((None, False, 1.0), r"^It learns as it is\.$"),
        ((None, True, 1.0), r"but did with a rate of 1, \d+ steps of warm-up\.$"),
        (("log", True, 1.0), r"but did with omega by the rule log, a rate of 1, "),
        ((None, False, 0.5), r"but did with a rate of 0\.5, 0 steps"),
        (("log", True, 0.5), r"but did with omega by the rule log, a rate of 0\.5, "),
        ((None, False, 3.0), r"but did with a rate of 3, "),
    ],
)
def test_advice_is_the_smallest_change_that_learns(scripted, learns, advice):
    order = [(rule, warms_up, rate) for rate in (1.0, 0.5, 3.0) for rule, warms_up in diagnosing.KINDS]
    scripted(lambda *run: 5 if order.index(run[:3]) >= order.index(learns) else 10)
    result = diagnose(Model(), [1.0, 0.5, 3.0], 20000)
    assert re.search(advice, result.advice), result.advice


def test_a_setting_that_learns_in_one_of_two_trials_does_not_count(scripted):
    ran = scripted(
        lambda rule, warms_up, rate, steps: 5 if rule == "constant" else 6 if warms_up else 9.9,
        lambda rule, warms_up, rate, steps: 7 if rule == "constant" else 10,
    )
    result = diagnose(Model(), steps=20000)
    as_it_is, warm_up, constant = result.trials
    assert (constant.status, constant.loss) == ("learns", 7)
    assert (warm_up.status, warm_up.loss) == (f"undecided in {warm_up.steps} steps", 10)
    assert [run[:2] for run in ran].count((None, True)) == 2
    assert as_it_is.status == "fails"
    assert as_it_is.steps == warm_up.steps == constant.steps
    assert "omega by the rule constant" in result.advice


def test_repetitions_that_fail_take_no_more_steps_than_a_tenth(scripted):
    trials = scripted(lambda *run: 5, lambda *run: 10)
    result = diagnose(Model(), [1.0, 0.5, 2.0], 20000)
    assert sum(steps for *_, steps in trials) <= 2000
    assert "learns" not in {trial.status for trial in result.trials}
    assert result.advice.startswith("Undecided")


def test_a_repetition_has_other_weights_of_the_same_law_and_other_batches():
    read = []
    trainer = diagnosing.Trainer(
        Model(3, drawn=False), BATCHES, lambda model, ids: read.append(ids) or loss(model, ids), adam
    )
    redrawn = trainer.copy(redraw=True)
    for name, weight in trainer.model.named_parameters():
        columns = redrawn.get_parameter(name)
        assert torch.equal(columns, weight) is (weight.dim() == 1), name
        assert torch.equal(columns.sort(-1).values, weight.sort(-1).values)
    first, second, _ = redrawn.encoder.layers
    assert torch.equal(first.linear1.weight, second.linear1.weight)  # copies stay copies
    read.clear()
    trainer.train(redrawn, 1e-3, 0, 3, skip=2)
    assert torch.equal(torch.stack(read), torch.stack(BATCHES[2:5]))


def test_seen():
    seen = " ".join(diagnose(Model(3, drawn=False)).seen)
    assert "copies (encoder.layers.0.self_attn.in_proj_weight, encoder.layers.1.self_attn.in_proj_weight" in seen
    assert "Admin is off: norm reads a sum whose shortcut no norm wrote." in seen
    model = Model(2)
    model.encoder.layers[1].linear2.weight.data *= 0.01
    (small,) = [line for line in diagnose(model, [1e-3]).seen if line.startswith("Two steps")]
    assert "encoder.layers.1.linear2.weight" in small
    assert not any("copies" in line or "Two steps" in line for line in diagnose(Model(2), [1e-3]).seen)


def test_refused():
    with pytest.raises(ValueError, match="Post-LN"):
        diagnose(Model(norm_first=True))
    with pytest.raises(ValueError, match=r"steps=1000 leaves 2 steps a trial; expected steps=3460 or more"):
        diagnose(Model(), steps=1000)
    with pytest.raises(ValueError, match="read only once"):
        admin.diagnose(Model(), iter(BATCHES), loss=loss, optimizer=adam, rates=[1e-3], steps=5000)
    model = Model()
    with pytest.raises(ValueError, match="did not call the model"):
        diagnose(Model(), loss=lambda _, ids: loss(model, ids))
    with pytest.raises(ValueError, match="even a copy that reads nothing diverges"):
        diagnose(Model(), loss=lambda model, ids: loss(model, ids) * math.nan)
    nn.init.uniform_(model.encoder.layers[0].norm1.weight)
    with pytest.raises(ValueError, match="has been trained"):
        diagnose(model)


def test_with_the_loss_and_the_batches_of_a_trainer(tmp_path):
    model, batch = build("bert", torch.float32)
    data = [{key: value[i] for key, value in batch.items()} for i in range(3)] * 4
    arguments = TrainingArguments(tmp_path, use_cpu=True, report_to=[], per_device_train_batch_size=3)
    trainer = Trainer(model, arguments, train_dataset=data)
    result = admin.diagnose(
        model, trainer.get_train_dataloader(), loss=trainer.compute_loss, optimizer=adam, rates=[1e-3], steps=5000
    )
    assert math.isfinite(result.plateau) and result.trials and result.advice
