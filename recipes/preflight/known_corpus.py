"""What a recipe trains on: the text that is prepared, or what is known of it before."""

from __future__ import annotations

import gzip
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


def there(binary: Path) -> bool:
    """Whether a text is prepared."""
    return next(binary.glob("train*.idx"), None) is not None


def prepared(binary: Path, pair: tuple[str, str], longest: int) -> KnownCorpus:
    """Of binary data that is there."""
    from fairseq.data.indexed_dataset import make_dataset

    name = f"train.{pair[0]}-{pair[1]}" if (binary / f"dict.{pair[0]}.txt").exists() else "train"
    languages = pair if name != "train" else (None, None)
    paths = [str(binary / (f"{name}.{side}" if side else name)) for side in languages]
    data = [make_dataset(path, "mmap") for path in paths]
    valid = make_dataset(str(binary / Path(paths[1]).name.replace("train", "valid", 1)), "mmap")
    units = [float(each.sizes.sum()) / len(each) for each in data]
    words = len(read_lines(next(binary.glob("dict*.txt")))) + 4
    longest = min(longest, int(max(each.sizes.max() for each in data)))
    return KnownCorpus(Corpus(pair, len(data[1]), (units[0], units[1]), longest, words, len(valid)), True, 0.0, 0.0)


def lines_and_bytes(stem: Path) -> tuple[int, int] | None:
    """Of a text, compressed or not; None if it is not there."""
    for path, opened in ((stem, open), (stem.with_name(f"{stem.name}.gz"), gzip.open)):
        if path.is_file():
            with opened(path, "rb") as file:
                sizes = [len(line) for line in file]
            return len(sizes), sum(sizes)
    return None


def counted(data: Path, pair: tuple[str, str], longest: int, words: int) -> KnownCorpus | None:
    """Of a user's own text in a folder (train.de or train.de.gz), by lines and bytes; None if it is not there so."""
    units, size, pairs = [], 0, 0
    for language in pair:
        found = lines_and_bytes(data / f"train.{language}")
        if found is None:
            return None
        pairs, text = found
        size += text
        units.append(text / max(1, pairs) / BYTES + 1)
    valid, _ = lines_and_bytes(data / f"valid.{pair[1]}") or (0, 0)
    corpus = Corpus(pair, pairs, (units[0], units[1]), longest, words, valid)
    return KnownCorpus(corpus, False, 3.0 * size, 2 * pairs * sum(units))


def stated(name: str, pair: tuple[str, str], longest: int, words: int, data: Path | None = None) -> KnownCorpus:
    """Of a text that is not prepared, by the table, or as DATA has it.

    Raises:
        ValueError: neither knows it.
    """
    for row in read_lines(CORPORA):
        columns = row.split("\t")
        if not row.startswith("#") and (name == columns[0] or name.startswith(f"{columns[0]}/")):
            pairs, source, target, text, binary, valid = (float(column) for column in columns[1:])
            corpus = Corpus(pair, int(pairs), (source, target), longest, words, int(valid))
            return KnownCorpus(corpus, False, text * GB, binary * GB)
    if data is not None and not data.is_dir():
        raise ValueError(f"DATA={data} is not a folder; expected one with the text")
    if data is not None and (found := counted(data, pair, longest, words)):
        return found
    raise ValueError(f"nothing is known of the text of {name}; prepare it first (make ... prepare), then look again.")
