"""`diagnose`: trials on copies, the plateau, other causes than depth, and the advice. The model does not change."""

from __future__ import annotations

import copy
import math
import re

import pytest
import torch
from post_ln import build
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

import fairseq_admin.pytorch as admin
from fairseq_admin.pytorch import diagnosing

WORDS, WIDTH = 8, 16


class Model(nn.Module):
    """Predicts its own input words, through a Post-LN encoder with independently drawn layers, or through `body`."""

    def __init__(self, layers=2, norm_first=False, drawn=True, body=None):
        super().__init__()
        torch.manual_seed(1)
        self.words, self.norm, self.out = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True, norm_first=norm_first)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.body = body or (lambda encoder, x: encoder(x))
        for weight in self.encoder.parameters() if drawn else ():
            if weight.dim() > 1:
                nn.init.xavier_uniform_(weight)

    def forward(self, ids):
        return self.out(self.body(self.encoder, self.norm(self.words(ids) + self.words.weight[0])))


def loss(model, ids):
    return cross_entropy(model(ids).flatten(0, 1), ids.flatten())


BATCHES = [torch.randint(WORDS, (4, 5), generator=torch.Generator().manual_seed(seed)) for seed in range(6)]


def diagnose(model, rates=(1e-4,), steps=20000, batches=BATCHES, loss=loss):
    return admin.diagnose(model, batches, loss=loss, optimizer=torch.optim.Adam, rates=rates, steps=steps)


@pytest.fixture
def scripted(monkeypatch):
    """Replace the losses: of trials, repetitions, the blind copy, and trials on a single batch. Returns what ran."""
    ran, train, copied = [], diagnosing.Trainer.train, diagnosing.Trainer.copy

    def of(loss_of, repeated=None, blind=(10.0, 10.0), alone=0.0):
        def named(trainer, change="as it is", repetition=False):
            model = copied(trainer, change, repetition)
            model.named = (change, repetition)
            return model

        def trial(trainer, model, rate, warm_up, steps, skip=0):
            if steps < 5:  # the first look
                return train(trainer, model, rate, warm_up, steps)
            for _ in range(steps):
                trainer.step_done()
            if any(module._forward_pre_hooks for module in model.modules() if isinstance(module, nn.LayerNorm)):
                return list(blind)
            if len(trainer.batches) == 1:
                return [alone]
            change, repetition = model.named
            assert (warm_up > 0) is (change != "as it is") and skip == steps * repetition
            ran.append((change, rate, repetition))
            return [(repeated if repetition and repeated else loss_of)(change, rate)]

        monkeypatch.setattr(diagnosing.Trainer, "train", trial)
        monkeypatch.setattr(diagnosing.Trainer, "copy", named)
        return ran

    return of


def test_a_shallow_model_learns_as_it_is_and_stays_so():
    model = Model()
    model.encoder.eval()
    model.kept = model(BATCHES[0])
    weights, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    modes = [module.training for module in model.modules()]
    data = DataLoader(torch.cat(BATCHES), batch_size=4, shuffle=True)
    result = diagnose(model, [1e-2], 6000, data)
    assert result.advice == "It learns as it is." == str(result).splitlines()[-1]
    assert result.trials[0].rule is None and result.trials[0].warm_up == 0 and result.trials[0].status == "learns"
    assert result.plateau == pytest.approx(math.log(WORDS), abs=0.15)  # all words are equally likely
    assert list(model.state_dict()) == list(weights)
    assert all(torch.equal(model.state_dict()[key], weight) for key, weight in weights.items())
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == modes


def test_a_blind_copy_reads_nothing_and_trains():
    trainer = diagnosing.Trainer(Model(4), BATCHES, loss, torch.optim.Adam)
    assert torch.equal(*map(trainer.blind().eval(), BATCHES[:2]))
    trainer.batches = [torch.full_like(batch, 3) for batch in BATCHES]  # a constant target is learned without reading
    assert trainer.train(trainer.blind(), 1e-2, 0, 40)[-1] < 0.5


class Translator(Model):
    def forward(self, *pair):
        return self.out(self.body(*(self.words(ids) + 3 * torch.eye(5, WIDTH) for ids in pair)))


@pytest.mark.parametrize(("reads", "status"), [(0, "learns"), (1, "fails")])
def test_a_decoder_that_does_not_read_its_source_fails(reads, status):
    pairs = [(torch.randint(WORDS, (16, 5)), torch.randint(WORDS, (16, 5))) for _ in range(40)]
    model = Translator(body=nn.Transformer(WIDTH, 2, 1, 1, 32, 0.0, batch_first=True))
    result = diagnose(model, [1e-2], 12000, pairs, lambda m, p: cross_entropy(m(*p).mT, p[reads]))
    assert result.trials[0].loss < 0.5 < result.plateau and result.trials[0].status == status
    assert ("as it is at 0.01: with another row's source, the loss is the same." in result.seen) is (reads == 1)


@pytest.mark.parametrize(("rates", "share"), [([1e-2], "8"), ([1e-2, 1e-3, 3e-3], "10")])
def test_no_more_steps_than_a_tenth_and_the_time_that_was_said(capsys, monkeypatch, rates, share):
    calls = []

    def unlearnable(model, ids):
        calls.append(torch.is_grad_enabled())
        return model(ids).square().mean() + 1e6

    monkeypatch.setattr(diagnosing.time, "monotonic", lambda: sum(calls))  # a second a step
    diagnose(Model(1), rates, 6000, loss=unlearnable)
    said = re.search(r"at most (\d+) steps, (\d+)% of 6000, (.*) minutes;", capsys.readouterr().err)
    assert sum(calls) <= int(said[1]) <= 600 and said[2] == share
    assert 1 <= float(said[3]) * 60 / sum(calls) < 1.5


@pytest.mark.parametrize(
    ("constant", "advice"),
    [
        (10, "No omega helped in 199 .* steps=40000: 398 a"),
        (9.6, "Undecided: constant at 0.0001 .* steps=75000: 746 a"),
    ],
)
def test_the_first_trials_are_stock_and_linear_at_two_rates(scripted, constant, advice):
    ran = scripted(lambda change, rate: constant if change == "constant" else 10)
    assert re.match(advice, diagnose(Model(), [1e-4, 5e-5, 2e-4]).advice)
    assert ran[:3] == [("linear", 1e-4, False), ("as it is", 1e-4, False), ("linear", 5e-5, False)] and len(ran) < 8


def test_only_smaller_changes_than_one_that_learns_go_on(scripted):
    ran = scripted(lambda change, rate: {"linear": 5, "as it is": math.inf}.get(change, 8))  # less than half the gain
    result = diagnose(Model(), [1e-4, 5e-5])
    assert [change for change, *_ in ran] == ["linear", "linear", "as it is", "warm-up"]
    assert [trial.status for trial in result.trials] == ["fails", "undecided", "learns"]
    change = "omega by the rule linear, a rate of 0.0001, 49 steps of warm-up"
    assert result.advice == f"In 199 steps it learned little or nothing as it is, but did with {change}."


@pytest.mark.parametrize(
    ("learns", "advice"),
    [
        (("as it is", 1e-4), r"^It learns as it is\.$"),
        (("warm-up", 1e-4), r"but did with a rate of 0\.0001, 49 steps of warm-up\.$"),
        (("redrawn", 1e-4), r"but did with each layer drawn by itself, a rate of 0\.0001, "),
        (("constant", 1e-4), r"but did with omega by the rule constant, a rate of 0\.0001, "),
        (("as it is", 5e-5), r"but did with a rate of 5e-05, 0 steps"),
    ],
)
def test_advice_is_the_smallest_change_that_learns(scripted, learns, advice):
    order = [(change, rate) for rate in (1e-4, 5e-5) for change in diagnosing.CHANGES]
    scripted(lambda *setting: 5 if order.index(setting) >= order.index(learns) else 10)
    assert re.search(advice, diagnose(Model(drawn=False), [1e-4, 5e-5]).advice)


def test_a_setting_that_learns_in_one_of_two_trials_does_not_count(scripted):
    ran = scripted(lambda change, rate: 5, lambda change, rate: 7 if change == "linear" else 9.9)
    as_it_is, warm_up, linear = diagnose(Model()).trials
    assert (linear.status, linear.loss, linear.gain) == ("learns", 7, 3)
    assert (warm_up.status, as_it_is.status, as_it_is.loss) == ("undecided", "undecided", 9.9)
    assert [repetition for *_, repetition in ran] == [False, True] * 3


@pytest.mark.parametrize(("reached", "status"), [(-0.5, "undecided"), (-1.5, "learns"), (0.0, "fails")])
def test_near_zero_a_gain_is_counted_in_the_noise_of_the_plateau(scripted, reached, status):
    scripted(lambda change, rate: reached, blind=(-0.5, 0.5))
    assert diagnose(Model()).trials[0].status == status


def test_a_repetition_has_other_weights_of_the_same_law_and_other_batches():
    read = []
    trainer = diagnosing.Trainer(Model(3, drawn=False), BATCHES, loss, torch.optim.Adam)
    assert diagnosing.copies(trainer.models[""])[1] == "encoder.layers.1.self_attn.out_proj.weight"
    for change, copies in (("linear", True), ("redrawn", False)):
        first, repetition = trainer.copy(change), trainer.copy(change, repetition=True)
        for (name, weight), other in zip(first.named_parameters(), repetition.parameters()):
            assert torch.equal(other, weight) is (weight.unique().numel() == 1), name
            assert torch.equal(other.sort(-1).values, weight.sort(-1).values), name
        weights = [layer.linear1.weight for layer in repetition.encoder.layers]
        assert torch.equal(weights[0], weights[1]) is copies
    trainer.loss = lambda model, ids: read.append(ids) or loss(model, ids)
    trainer.train(repetition, 1e-3, 0, 3, skip=2)
    assert torch.equal(torch.stack(read), torch.stack(BATCHES[2:5]))


def without_residual(encoder, x):
    for layer in encoder.layers:
        x = layer.norm1(x + layer.self_attn(x, x, x)[0])
        x = layer.norm2(layer.linear2(layer.linear1(x).relu()))
    return x


@pytest.mark.parametrize(
    ("model", "goal", "alone", "cause"),
    [
        (Model(body=lambda encoder, x: [layer(x) for layer in encoder.layers][0]), 0, 0, "layers.1.* gets no gradient"),
        (Model(3, body=without_residual), 0, 0, r"encoder.layers.0.norm2, like .* reads no sum x \+ f\(x\)"),
        (Model(), 40.0, 0, r"batch\['goal'\] is far from unit scale \(on average 43\)"),
        (Model(), 0, 10, "A single batch is not learned in 199 steps"),
    ],
)
def test_other_causes_are_named_and_no_omega_is_advised(scripted, model, goal, alone, cause):
    ran = scripted(lambda change, rate: 10, alone=alone)
    batches = [{"ids": ids, "goal": goal + ids} for ids in BATCHES]
    result = diagnose(model, batches=batches, loss=lambda model, batch: loss(model, batch["ids"]))
    assert re.search(f"no remedy. First: .*{cause}", result.advice), result.advice
    assert any(change in diagnosing.RULES for change, *_ in ran) is (alone == 10)


def test_lower_rates_come_before_omega_at_a_rate_that_is_too_large(scripted):
    model = Model()
    model.encoder.layers[1].linear2.weight.data *= 0.01
    scripted(lambda change, rate: 5 if change == "linear" or rate < 1e-3 else 10)
    result = diagnose(model, [1e-3, 5e-4])
    assert "Two steps at 0.001 change encoder.layers.1.linear2.weight by" in " ".join(result.seen)
    assert result.advice.endswith("but did with a rate of 0.0005, 0 steps of warm-up.")
    assert "Two steps" not in " ".join(diagnose(Model(), [1e-3]).seen)


def test_a_model_that_will_not_fold_is_tried(scripted):
    model = Model()
    for layer in model.encoder.layers:
        layer.dropout2 = nn.Tanh()
    scripted(lambda change, rate: 5 if change == "linear" else 10)
    advice = diagnose(model).advice
    assert 'linear, a rate of 0.0001, 49 steps of warm-up. Give attach unfoldable="keep": Model cannot be fo' in advice


def test_refused():
    model, trained = Model(), Model()
    nn.init.uniform_(trained.encoder.layers[0].norm1.weight)
    for message, refused, options in [
        ("Post-LN", Model(norm_first=True), {}),
        ("has been trained", trained, {}),
        ("steps=900; expected 1000 or more", model, {"steps": 900}),
        ("read only once", model, {"batches": iter(BATCHES)}),
        ("did not call the model", model, {"loss": lambda _, ids: loss(trained, ids)}),
        ("even a copy that reads nothing", model, {"steps": 1000, "loss": lambda m, ids: loss(m, ids) * math.nan}),
    ]:
        with pytest.raises(ValueError, match=message):
            diagnose(refused, **options)


def test_with_the_loss_and_the_batches_of_a_trainer(tmp_path):
    model, batch = build("bert", torch.float32)
    data = [{key: value[i] for key, value in batch.items()} for i in range(3)] * 4
    trainer = Trainer(model, TrainingArguments(tmp_path, use_cpu=True, report_to=[]), train_dataset=data)
    result = diagnose(model, [1e-3], 1000, trainer.get_train_dataloader(), trainer.compute_loss)
    assert math.isfinite(result.plateau) and result.trials and result.advice
