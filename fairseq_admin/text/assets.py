"""The files next to a model that say how its text is prepared: dictionaries, text.json, merges.

A text has two folders. The outer folder holds merges, settings and dictionaries. Its subfolder `bin` holds fairseq's
data. fairseq-preprocess writes the dictionaries next to its data, so a file may be in either folder. The user names
one.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from .. import fingerprint
from ..errors import AdminError, line
from .bpe import CODES
from .tokens import FILE, Text

if TYPE_CHECKING:
    from fairseq.data import Dictionary

BINARISED = re.compile(r"[^.]+\.(.+)-(.+)\.(?:\1|\2)\.idx")
"""fairseq-preprocess's file names, such as train.de-en.de.idx."""

FINGERPRINTS = "fingerprints.json"
"""The file with the fingerprints of the text, in an exported folder."""
POSITIONS = "positions"
"""The entry of that file with the number of positions, which CTranslate2's own files lack."""

Languages = tuple[str | None, str | None]
"""Source and target language; None where unknown."""


def folders(folder: Path) -> list[Path]:
    """The two folders of a text.

    Args:
        folder: the one that the user named.

    Returns:
        That folder, and the other one.
    """
    is_bin = folder.absolute().name == "bin"
    return [folder, Path(os.path.normpath(folder / "..")) if is_bin else folder / "bin"]


def binarised(name: str) -> Path:
    """The `type` of an option: the folder with binarised data.

    Args:
        name: the text's folder, or its `bin`.

    Returns:
        The folder with data. Without data: `bin` if it exists, otherwise the named folder.
    """
    text = Path(name)
    without_data = text / "bin" if (text / "bin").is_dir() else text
    return next((folder for folder in folders(text) if any(folder.glob("*.idx"))), without_data)


def files_in(places: Iterable[Path]) -> list[Path]:
    """List the files of a model's text: merges, settings, dictionaries, binarised data.

    Args:
        places: the folders to look in.
    """
    patterns = (CODES, FILE, "dict.*.txt", "*.*-*.*.idx", "*.*-*.*.bin")
    return [path for place in places for pattern in patterns for path in place.glob(pattern)]


class Assets:
    """The files of one model's text, in the two `folders` that the user names, or next to the model."""

    def __init__(
        self, model: Path, data: Path | None = None, codes: Path | None = None, languages: Languages = (None, None)
    ) -> None:
        """
        Args:
            model: a checkpoint, or another engine's folder.
            data: folder of the files. None: next to the model.
            codes: the file of merges, if it is elsewhere.
            languages: those on the command line.

        Raises:
            AdminError: the fingerprints of the model's folder cannot be read.
        """
        self.model = model
        self.folders = folders(data) if data else [model if model.is_dir() else model.parent]
        self.places = " or ".join(os.path.abspath(folder) for folder in self.folders)
        self.codes = codes
        self.asked = languages
        self.expected: Mapping[str, str] = _read_fingerprints(model) if model.is_dir() else {}
        """Known fingerprints of the model's files. A file with another fingerprint is refused."""

    def find(self, name: str) -> Path | None:
        """Find a file.

        Args:
            name: the file name.

        Returns:
            Its path. None: it is missing.

        Raises:
            AdminError: the file belongs to another model.
        """
        path = self.codes if name == CODES else None
        path = path or next((folder / name for folder in self.folders if (folder / name).is_file()), None)
        if path and name in self.expected and self.expected[name] not in _fingerprints(path, name):
            raise AdminError(
                f"{path} is another model's: {self.model} was trained with a {path.name} of other content. Give the "
                "folder of the model's own as --data."
            )
        return path

    def need(self, name: str, instead: str = "") -> Path:
        """Find a file that must be there.

        Args:
            name: the file name.
            instead: what the message names after --data as an alternative. The text begins with a comma.

        Returns:
            Its path.

        Raises:
            AdminError: the file is missing, or belongs to another model.
        """
        path = self.find(name)
        if path is None:
            raise AdminError(
                f"there is no {name} in {self.places}. Give the folder of the model's training text, where {name} is, "
                f"as --data{instead}."
            )
        return path

    def files(self) -> list[Path]:
        """List every file that may be read: the files of the model and of its text."""
        model = list(self.model.iterdir()) if self.model.is_dir() else [self.model]
        return [*model, *([self.codes] if self.codes else []), *files_in(self.folders)]

    def fingerprints(self) -> dict[str, str]:
        """Compute the fingerprints of the merges and the settings.

        Returns:
            By file name; a missing file is left out.
        """
        paths = {name: self.find(name) for name in (CODES, FILE)}
        return {name: _fingerprints(path, name)[0] for name, path in paths.items() if path}

    def refuse_other_dictionaries(self) -> None:
        """Refuse folders with dictionaries of which none is the model's.

        Raises:
            AdminError: the folders are of another model's text.
        """
        paths = [path for folder in self.folders for path in folder.glob("dict*.txt")]
        known = {self.expected[stack] for stack in ("encoder", "decoder") if stack in self.expected}
        words = [_load(path) for path in paths if known]
        if words and known.isdisjoint(map(fingerprint.of_dictionary, words)):
            fingerprint.refuse_other_dictionary(words[0], paths[0], len(words[0]), min(known))

    def text(self) -> Text | None:
        """Read the settings in text.json.

        Returns:
            The settings. None: the file is missing.
        """
        path = self.find(FILE)
        return Text.read(path) if path else None

    def languages(self, source: str | None, target: str | None) -> tuple[str, str]:
        """Find source and target: on the command line, in the model, in text.json, or in the names of binarised data.

        fairseq-train stores the languages only if they are on its command line; otherwise it takes them from the data's
        names.

        Args:
            source, target: the languages that the model names. None: it names none.

        Returns:
            Their codes.

        Raises:
            AdminError: nothing names them, or two sources disagree.
        """
        text = self.text()
        pairs: list[tuple[object, Languages]] = [("the command line", self.asked), (self.model, (source, target))]
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
                    "(as train.de-en.de.idx) to tell them. Give the folder as --data or, to translate and export, "
                    "--source-lang and --target-lang."
                )
            first, chosen = known[0]
            for who, pair in known:
                if pair[side] != chosen[side]:
                    spelled = ["-".join(code or "?" for code in codes) for codes in (pair, chosen)]
                    raise AdminError(f"{who} is for {spelled[0]} and {first} for {spelled[1]}. Give the model's own.")
            languages.append(str(chosen[side]))
        return languages[0], languages[1]

    def _binarised(self) -> Languages:
        """The languages in the names of binarised data, if there is any.

        Raises:
            AdminError: there is data of several pairs.
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
        """Load fairseq's dictionary of a language.

        Args:
            language: the code of the language.
            size: number of symbols that the model has.
            stack: the stack that reads it, "encoder" or "decoder".

        Returns:
            The dictionary.

        Raises:
            AdminError: the file is missing, is no dictionary, or belongs to another model.
        """
        path = self.need(f"dict.{language}.txt")
        words = _load(path)
        fingerprint.refuse_other_dictionary(words, path, size, self.expected.get(stack))
        return words


def _load(path: Path) -> Dictionary:
    """Load fairseq's dictionary from a file."""
    from fairseq.data import Dictionary

    try:
        return Dictionary.load(str(path))
    except OSError:
        raise
    except Exception as error:  # its parser checks nothing
        raise AdminError(f"{path} is not a dictionary of fairseq's ({line(error)}). Give the model's own.") from None


def _fingerprints(path: Path, name: str) -> list[str]:
    """Fingerprints of the merges or of text.json.

    If `perl` is off, the list also has the fingerprint that text.json had before `perl` existed.
    """
    if name == CODES:
        return [fingerprint.of_bytes(path.read_bytes())]
    settings = asdict(Text.read(path))
    kept = [settings] if settings["perl"] else [settings, {k: v for k, v in settings.items() if k != "perl"}]
    return [fingerprint.of_bytes(json.dumps(each, sort_keys=True).encode()) for each in kept]


def _read_fingerprints(folder: Path) -> dict[str, str]:
    """The fingerprints in an exported folder; none if another program wrote it."""
    try:
        return {**json.loads((folder / FINGERPRINTS).read_text(encoding="utf-8"))}
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError):
        raise AdminError(
            f"{folder / FINGERPRINTS} holds no fingerprints of the text. Export the folder again."
        ) from None
