"""How long a run takes, and what it costs, from what a few of its updates took."""

from __future__ import annotations

import datetime
from dataclasses import dataclass

from recipes.preflight.trial import Measured


@dataclass(frozen=True)
class Forecast:
    updates_an_epoch: float
    updates: float
    seconds_an_update: float
    tokens_a_second: float

    @property
    def days(self) -> float:
        return self.updates * self.seconds_an_update / 86400


def forecast(
    found: Measured, *, pairs: int, units: float, tokens: int, epochs: int | None, updates: int | None
) -> Forecast:
    """The whole run's time.

    Args:
        pairs, units: the corpus's sentences, and target units a sentence.
        tokens: that an update may hold, padding and all. A trial with smaller updates is scaled by their tokens.
        epochs, updates: how long it is to be; one of them.
    """
    an_update = found.tokens * tokens / found.batch
    an_epoch = pairs * units / an_update
    seconds = found.seconds * tokens / found.batch
    whole = epochs * an_epoch if epochs else float(updates or 0)
    return Forecast(an_epoch, whole, seconds, found.tokens / found.seconds)


def length(days: float) -> str:
    """A duration, in the unit that suits it."""
    for unit, name in ((365.0, "years"), (1.0, "days"), (1 / 24, "hours")):
        if days >= unit:
            return f"{days / unit:.1f} {name}"
    return f"{days * 1440:.1f} minutes"


def lines(found: Forecast, *, now: datetime.datetime, price: float | None, devices: int, save_every: int) -> list[str]:
    """What the page says of time, cost, and what a kill loses."""
    epoch = length(found.updates_an_epoch * found.seconds_an_update / 86400)
    text = [
        f"{found.seconds_an_update:.3g} s an update, {found.tokens_a_second:.0f} tokens/s; "
        f"{found.updates_an_epoch:.0f} updates an epoch, {epoch}",
        f"{found.updates:.0f} updates in all: {length(found.days)} of training, validation and checkpoints apart",
    ]
    # The calendar ends with the year 9999.
    if found.days < 365 * 1000:
        text.append(f"started now, it ends on {(now + datetime.timedelta(days=found.days)).strftime('%Y-%m-%d %H:%M')}")
    if price is not None:
        text.append(f"cost: {found.days * 24 * price * devices:.2f}, at {price:g} an hour and device")
    lost = length(save_every * found.seconds_an_update / 86400)
    text.append(f"a kill loses what came after the last checkpoint: up to {save_every} updates, {lost}")
    return text
