"""How long a run takes, and what it costs, from what a few of its updates took."""

from __future__ import annotations

import datetime
from dataclasses import dataclass

from recipes.preflight.trial import Corpus, Measured

FORWARD = 1 / 3
"""What of an update's time a token takes in validation: the backward pass costs about twice the forward."""


@dataclass(frozen=True)
class Forecast:
    updates_an_epoch: float
    updates: float
    seconds_an_update: float
    tokens_a_second: float
    validations: float
    seconds_a_validation: float
    start: float

    @property
    def training(self) -> float:
        """Days of it."""
        return self.updates * self.seconds_an_update / 86400

    @property
    def validation(self) -> float:
        """Days of it."""
        return self.validations * self.seconds_a_validation / 86400

    @property
    def days(self) -> float:
        return self.training + self.validation + self.start / 86400


def forecast(
    found: Measured, corpus: Corpus, *, tokens: int, epochs: int | None, updates: int | None, save_every: int
) -> Forecast:
    """The whole run's time.

    Args:
        tokens: that an update may hold, padding and all. A trial with smaller updates is scaled by their tokens.
        epochs, updates: how long it is to be; one of them.
        save_every: updates from one validation to the next. An epoch ends with one, too.
    """
    an_update = found.tokens * tokens / found.batch
    an_epoch = corpus.pairs * corpus.units[1] / an_update
    whole = epochs * an_epoch if epochs else float(updates or 0)
    speed = found.tokens / found.seconds
    return Forecast(
        updates_an_epoch=an_epoch,
        updates=whole,
        seconds_an_update=found.seconds * tokens / found.batch,
        tokens_a_second=speed,
        validations=whole // save_every + (epochs or 0),
        seconds_a_validation=FORWARD * corpus.valid * corpus.units[1] / speed,
        start=found.start,
    )


def length(days: float) -> str:
    """A duration, in the unit that suits it."""
    for unit, name in ((365.0, "years"), (1.0, "days"), (1 / 24, "hours"), (1 / 1440, "minutes")):
        if days >= unit:
            return f"{days / unit:.1f} {name}"
    return f"{days * 86400:.{1 if days < 1 / 8640 else 0}f} seconds"


def lines(found: Forecast, *, now: datetime.datetime, price: float | None, devices: int, save_every: int) -> list[str]:
    """What the page says of time, cost, and what a kill loses."""
    epoch = length(found.updates_an_epoch * found.seconds_an_update / 86400)
    text = [
        f"{length(found.seconds_an_update / 86400)} an update, {found.tokens_a_second:.0f} tokens/s; "
        f"{found.updates_an_epoch:.0f} updates an epoch, {epoch}",
        f"{found.updates:.0f} updates in all: {length(found.training)}; {found.validations:.0f} validations: "
        f"{length(found.validation)}; start: {length(found.start / 86400)}; together {length(found.days)}, "
        "checkpoints apart",
    ]
    # The calendar ends with the year 9999.
    if found.days < 365 * 1000:
        text.append(f"started now, it ends on {(now + datetime.timedelta(days=found.days)).strftime('%Y-%m-%d %H:%M')}")
    if price is not None:
        text.append(f"cost: {found.days * 24 * price * devices:.2f}, at {price:g} an hour and device")
    lost = length(save_every * found.seconds_an_update / 86400)
    text.append(f"a kill loses what came after the last checkpoint: up to {save_every} updates, {lost}")
    return text
