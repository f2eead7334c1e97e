"""What is next to a model and tells how its text is treated: dictionaries, text.json, the codes of its units."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from .. import fingerprint
from ..errors import AdminError, line
from .bpe import CODES
from .folders import files_in, folders
from .tokens import FILE, Text

if TYPE_CHECKING:
    from fairseq.data import Dictionary

BINARISED = re.compile(r"[^.]+\.(.+)-(.+)\.(?:\1|\2)\.idx")
"""How fairseq-preprocess names its files, as train.de-en.de.idx."""

NOTED = "fingerprints.json"
"""The file of an exported folder that holds the fingerprints of its text."""

Pair = tuple[str | None, str | None]
"""Source and target, as far as they are known."""


class Assets:
    """The files that belong to one model.

    They are in the two folders of a text (folders.py), one of which the user names; else next to the model.
    """

    def __init__(
        self, model: Path, data: Path | None = None, codes: Path | None = None, languages: Pair = (None, None)
    ) -> None:
        """
        Args:
            model: a checkpoint, or another engine's folder.
            data: where the files are; None: next to the model.
            codes: the merges, if they are in another place.
            languages: what the user says of them.

        Raises:
            AdminError: the folder's fingerprints cannot be read.
        """
        self.model = model
        self.folders = folders(data) if data else [model if model.is_dir() else model.parent]
        self.places = " or ".join(os.path.abspath(folder) for folder in self.folders)
        self.codes = codes
        self.asked = languages
        self.expected: Mapping[str, str] = _noted(model) if model.is_dir() else {}
        """The fingerprints of the model's own files, as far as they are known; others are refused."""

    def find(self, name: str) -> Path | None:
        """A file by its name, if it is there.

        Raises:
            AdminError: it is another model's.
        """
        path = self.codes if name == CODES else None
        path = path or next((folder / name for folder in self.folders if (folder / name).is_file()), None)
        if path and name in self.expected and self.expected[name] not in _fingerprints(path, name):
            raise self._foreign(path)
        return path

    def need(self, name: str, instead: str = "") -> Path:
        """A file by its name.

        Args:
            name: the file's.
            instead: what else the user can do, from a comma on.

        Raises:
            AdminError: it is not there, or another model's.
        """
        path = self.find(name)
        if path is None:
            raise AdminError(
                f"there is no {name} in {self.places}. Give the folder of the model's training text, where {name} is, "
                f"as --data{instead}."
            )
        return path

    def files(self) -> list[Path]:
        """Every file that may be read: the model's own, and what tells how its text is treated."""
        model = list(self.model.iterdir()) if self.model.is_dir() else [self.model]
        return [*model, *([self.codes] if self.codes else []), *files_in(self.folders)]

    def fingerprints(self) -> dict[str, str]:
        """Those of the merges and the settings that are there."""
        paths = {name: self.find(name) for name in (CODES, FILE)}
        return {name: _fingerprints(path, name)[0] for name, path in paths.items() if path}

    def text(self) -> Text | None:
        """How the text is tokenised, if text.json is there."""
        path = self.find(FILE)
        return Text.read(path) if path else None

    def languages(self, source: str | None, target: str | None) -> tuple[str, str]:
        """Source and target: those the user asks for, the model's own, text.json's, or those of the binarised data.

        fairseq-train notes only those that it was given; else it takes them from the data's names, as here.

        Args:
            source, target: the model's own, as far as it tells.

        Raises:
            AdminError: nobody tells them, or two of these do not agree.
        """
        text = self.text()
        pairs: list[tuple[object, Pair]] = [("the command line", self.asked), (self.model, (source, target))]
        if text:
            pairs.append((self.find(FILE), (text.source, text.target)))
        if not all(any(sides) for sides in zip(*(pair for _, pair in pairs))):
            pairs.append((self.places, self._binarised()))
        languages = []
        for side in (0, 1):
            known = [(who, pair) for who, pair in pairs if pair[side]]
            if not known:
                raise AdminError(
                    f"{self.model} does not tell its languages, and {self.places} has no {FILE} and no binarised data "
                    "(as train.de-en.de.idx) to tell them. Give --source-lang and --target-lang, or the folder as "
                    "--data."
                )
            first, chosen = known[0]
            for who, pair in known:
                if pair[side] != chosen[side]:
                    spelled = ["-".join(code or "?" for code in codes) for codes in (pair, chosen)]
                    raise AdminError(f"{who} is for {spelled[0]} and {first} for {spelled[1]}. Give the model's own.")
            languages.append(str(chosen[side]))
        return languages[0], languages[1]

    def _binarised(self) -> Pair:
        """The languages of the binarised data's names, if there are any.

        Raises:
            AdminError: there are several pairs.
        """
        names = [path.name for folder in self.folders for path in folder.glob("*.idx")]
        pairs = sorted({(match[1], match[2]) for match in map(BINARISED.fullmatch, names) if match})
        if len(pairs) > 1:
            raise AdminError(
                f"{self.places} has data of {', '.join('-'.join(pair) for pair in pairs)}, and {self.model} does not "
                "tell which it is for. Give --source-lang and --target-lang."
            )
        return pairs[0] if pairs else (None, None)

    def dictionary(self, language: str, size: int, stack: str) -> Dictionary:
        """fairseq's dictionary of a language.

        Args:
            language: its code.
            size: how many symbols the model has.
            stack: which of the model's stacks reads it, "encoder" or "decoder".

        Raises:
            AdminError: it is not there, is not a dictionary, or is another model's.
        """
        from fairseq.data import Dictionary

        path = self.need(f"dict.{language}.txt")
        try:
            words = Dictionary.load(str(path))
        except OSError:
            raise
        except Exception as error:  # whatever its parser trips over
            raise AdminError(
                f"{path} is not a dictionary of fairseq's ({line(error)}). Give the model's own."
            ) from None
        if len(words) != size:
            raise AdminError(f"{path} has {len(words)} symbols and the model {size}. Give the model's own dictionary.")
        if self.expected.get(stack) not in (None, fingerprint.of_dictionary(words)):
            raise self._foreign(path)
        return words

    def _foreign(self, path: Path) -> AdminError:
        return AdminError(
            f"{path} is another model's: {self.model} was trained with a {path.name} of other content. Give the folder "
            "of the model's own as --data."
        )


def _fingerprints(path: Path, name: str) -> list[str]:
    """The fingerprint of the merges or of text.json, and the one that such a text.json was noted by before `perl`."""
    if name == CODES:
        return [fingerprint.of_bytes(path.read_bytes())]
    settings = asdict(Text.read(path))
    kept = [settings] if settings["perl"] else [settings, {k: v for k, v in settings.items() if k != "perl"}]
    return [fingerprint.of_bytes(json.dumps(each, sort_keys=True).encode()) for each in kept]


def _noted(folder: Path) -> dict[str, str]:
    """The fingerprints of an exported folder; none of one that another program wrote."""
    try:
        return {**json.loads((folder / NOTED).read_text(encoding="utf-8"))}
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError):
        raise AdminError(f"{folder / NOTED} holds no fingerprints of the text. Export the folder again.") from None
