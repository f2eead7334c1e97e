"""What is next to a model and tells how its text is treated: dictionaries, text.json, the codes of its units."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from fairseq.data import Dictionary

from .. import fingerprint
from ..errors import AdminError
from .bpe import CODES
from .tokens import FILE, Text


class Assets:
    """The files that belong to one model.

    They are in a folder that the user names, or in its folder `bin`, where fairseq-preprocess writes; else next to the
    model.
    """

    def __init__(self, model: Path, data: Path | None, expected: Mapping[str, str] | None = None) -> None:
        """
        Args:
            model: the checkpoint or folder.
            data: where the files are; None: next to the model.
            expected: fingerprints of the model's own files, as far as they are known.
        """
        self.model = model
        self.expected = expected or {}
        self.folders = [data, data / "bin"] if data else [model if model.is_dir() else model.parent]

    def find(self, name: str) -> Path | None:
        """A file by its name, if it is there.

        Raises:
            AdminError: it is another model's.
        """
        found = next((folder / name for folder in self.folders if (folder / name).is_file()), None)
        if found and name in self.expected and fingerprint.of_bytes(found.read_bytes()) != self.expected[name]:
            raise self._foreign(found)
        return found

    def _foreign(self, path: Path) -> AdminError:
        return AdminError(
            f"{path} is another model's: {self.model} was trained with a {path.name} of other content. Give the folder "
            "of the model's own as --data."
        )

    def fingerprints(self) -> dict[str, str]:
        """Those of the merges and the settings that are there."""
        found = {name: path for name in (CODES, FILE) if (path := self.find(name))}
        return {name: fingerprint.of_bytes(path.read_bytes()) for name, path in found.items()}

    def need(self, name: str) -> Path:
        """A file by its name.

        Raises:
            AdminError: it is not there.
        """
        found = self.find(name)
        if found is None:
            raise AdminError(
                f"there is no {name} in {' or '.join(map(str, self.folders))}. Give the folder of the model's training "
                f"text, where {name} is, as --data."
            )
        return found

    def text(self) -> Text | None:
        """How the text is tokenised, if text.json is there.

        Raises:
            AdminError: it is malformed.
        """
        path = self.find(FILE)
        return Text.read(path) if path else None

    def languages(self, source: str | None, target: str | None) -> tuple[str, str]:
        """Source and target: the model's own, or else text.json's. (fairseq-train notes only those it was given.)

        Raises:
            AdminError: nobody tells them, they are no codes of languages, or text.json is another pair's.
        """
        text = self.text()
        if text and not (source and target):
            source, target = text.source, text.target
        if not (source and target):
            self.need(FILE)
        if not all(re.fullmatch(r"[\w.-]+", str(language)) for language in (source, target)):
            raise AdminError(
                f"{self.model} was trained from {source!r} to {target!r}; the codes of two languages were expected, as "
                "in dict.de.txt. Train it again with --source-lang and --target-lang."
            )
        if text and (source, target) != (text.source, text.target):
            raise AdminError(
                f"{self.find(FILE)} is for {text.source}-{text.target} and {self.model} for {source}-{target}. Give "
                "the model's own."
            )
        return str(source), str(target)

    def dictionary(self, language: str, size: int, stack: str) -> Dictionary:
        """fairseq's dictionary of a language.

        Args:
            language: its code.
            size: how many symbols the model has.
            stack: which of the model's stacks reads it, "encoder" or "decoder".

        Raises:
            AdminError: it is not there, or is not a dictionary, or another model's.
        """
        path = self.need(f"dict.{language}.txt")
        try:
            words = Dictionary.load(str(path))
        except Exception as error:  # whatever its parser trips over
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise AdminError(f"{path} is not a dictionary of fairseq's ({reason}). Give the model's own.") from None
        if len(words) != size:
            raise AdminError(f"{path} has {len(words)} symbols and the model {size}. Give the model's own dictionary.")
        if self.expected.get(stack) not in (None, fingerprint.of_dictionary(words)):
            raise self._foreign(path)
        return words
