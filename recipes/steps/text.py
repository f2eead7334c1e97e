"""Say how a recipe's text is tokenised, once, for its steps and for whoever translates with the model.

    python -m recipes.steps.text de en normalise aggressive_dashes escape -o runs/demo/data/text.json

The steps import the package's text from here.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from recipes.steps.common import replacing, run

if TYPE_CHECKING:
    from fairseq_admin.text.bpe import BPE, remove_bpe
    from fairseq_admin.text.tokens import Text
else:
    from recipes.plugin.text.bpe import BPE, remove_bpe
    from recipes.plugin.text.tokens import Text

__all__ = ["BPE", "Text", "remove_bpe"]


def main() -> None:
    settings = [field.name for field in dataclasses.fields(Text) if isinstance(field.default, bool)]
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("source")
    parser.add_argument("target")
    parser.add_argument("settings", nargs="*", metavar="SETTING", help=f"what is done: {', '.join(settings)}")
    parser.add_argument("-o", "--out", type=Path, required=True)
    args = parser.parse_args()
    for unknown in sorted(set(args.settings) - set(settings)):
        raise ValueError(f"{unknown} is not a setting of the text; expected some of {', '.join(settings)}.")
    text = Text(args.source, args.target, **dict.fromkeys(args.settings, True))
    from recipes.steps import languages  # sacreBLEU, which the steps that import from here can do without

    languages.say_unknown(text)
    languages.say_normalised(text)
    languages.metric(text)  # refuses, before anything is trained, what could not be scored
    with replacing(args.out) as part:
        text.write(part)


if __name__ == "__main__":
    run(main)
