"""What a recipe trains on: the text that is prepared, or what is known of it before."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from recipes.preflight.trial import Corpus
from recipes.steps.common import read_lines

CORPORA = Path(__file__).with_name("corpora.tsv")
GB = 1e9
# Of a byte-pair unit in a European language, with the space before it.
BYTES = 4.5


@dataclass(frozen=True)
class KnownCorpus:
    """A corpus, and the bytes that its text and its binary data have yet to take."""

    corpus: Corpus
    prepared: bool
    text: float
    binary: float


def prepared(binary: Path, pair: tuple[str, str], longest: int) -> KnownCorpus:
    """Of binary data that is there."""
    from fairseq.data.indexed_dataset import make_dataset

    name = f"train.{pair[0]}-{pair[1]}" if (binary / f"dict.{pair[0]}.txt").exists() else "train"
    languages = pair if name != "train" else (None, None)
    data = [make_dataset(str(binary / (f"{name}.{side}" if side else name)), "mmap") for side in languages]
    units = [float(each.sizes.sum()) / len(each) for each in data]
    words = len(read_lines(next(binary.glob("dict*.txt")))) + 4
    longest = min(longest, int(max(each.sizes.max() for each in data)))
    return KnownCorpus(Corpus(pair, len(data[1]), (units[0], units[1]), longest, words), True, 0.0, 0.0)


def counted(data: Path, pair: tuple[str, str], longest: int, words: int) -> KnownCorpus | None:
    """Of a user's own text in a folder (train.de, train.en), by its lines and bytes; None if it is not there so."""
    units, size, pairs = [], 0, 0
    for language in pair:
        path = data / f"train.{language}"
        if not path.is_file():
            return None
        with path.open("rb") as file:
            pairs = sum(1 for _ in file)
        size += path.stat().st_size
        units.append(path.stat().st_size / max(1, pairs) / BYTES + 1)
    corpus = Corpus(pair, pairs, (units[0], units[1]), longest, words)
    return KnownCorpus(corpus, False, 3.0 * size, 2 * pairs * sum(units))


def stated(name: str, pair: tuple[str, str], longest: int, words: int, data: Path | None = None) -> KnownCorpus:
    """Of a text that is not prepared, as DATA has it, or by the table.

    Raises:
        ValueError: the table does not know it.
    """
    if data is not None and (found := counted(data, pair, longest, words)):
        return found
    for row in read_lines(CORPORA):
        columns = row.split("\t")
        if not row.startswith("#") and (name == columns[0] or name.startswith(f"{columns[0]}/")):
            pairs, source, target, text, binary = (float(column) for column in columns[1:])
            return KnownCorpus(
                Corpus(pair, int(pairs), (source, target), longest, words), False, text * GB, binary * GB
            )
    raise ValueError(f"nothing is known of the text of {name}; prepare it first (make ... prepare), then look again.")
