"""Get one raw text of Multi30k: download it, or take it from a folder; check it either way.

    python -m recipes.multi30k.fetch train.de --out runs/multi30k/raw/train.de
    python -m recipes.multi30k.fetch train.de --data DIR --out runs/multi30k/raw/train.de

The checksums are of the plain text: the same text compressed again is another gzip file, and is welcome.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import http.client
import urllib.error
import urllib.request
import zlib
from pathlib import Path

from recipes.steps.common import read_lines, replacing, run

COMMIT = "a3d2e0d26b56f3846f66a952536ffed4e401d05a"
URL = f"https://raw.githubusercontent.com/multi30k/dataset/{COMMIT}/data/task1/raw"
SECONDS = 60


def download(url: str) -> bytes:
    """The file behind the URL, whole.

    Raises:
        ValueError: it cannot be had, or the connection broke off.
    """
    hint = "Run again, or download the files yourself and give their folder with DATA=DIR."
    try:
        with urllib.request.urlopen(url, timeout=SECONDS) as response:
            return response.read()
    except urllib.error.HTTPError as error:
        raise ValueError(f"{url}: the server answers {error.code} {error.reason}. {hint}") from None
    except http.client.IncompleteRead as error:
        got = len(error.partial)
        raise ValueError(f"{url}: broke off after {got} of {got + (error.expected or 0)} bytes. {hint}") from None
    except (OSError, http.client.HTTPException) as error:
        raise ValueError(f"{url}: {getattr(error, 'reason', None) or error}. {hint}") from None


def take(folder: Path, name: str) -> tuple[str, bytes]:
    """The path and the bytes of NAME.gz, or else NAME, in the folder."""
    for path in (folder / f"{name}.gz", folder / name):
        if path.is_file():
            return str(path), path.read_bytes()
    raise ValueError(f"{folder}: found neither {name}.gz nor {name}; expected one of them. Check DATA={folder}.")


def plain(where: str, data: bytes) -> bytes:
    """Undo gzip, if the data is an archive.

    Raises:
        ValueError: the archive is truncated or corrupt.
    """
    if not where.endswith(".gz"):
        return data
    try:
        return gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(
            f"{where}: found a broken archive of {len(data)} bytes ({error}), expected a whole gzip file. "
            "Fetch it again."
        ) from None


def check(where: str, text: bytes, expected: str) -> None:
    found = hashlib.sha256(text).hexdigest()
    if found != expected:
        raise ValueError(
            f"{where}: its text has SHA-256 {found}, expected {expected}. It is not the published text: fetch it "
            f"again, from commit {COMMIT[:12]} of multi30k/dataset."
        )


def checksum(sums: Path, name: str) -> str:
    for line in read_lines(sums):
        digest, _, file = line.partition("  ")
        if file == name:
            return digest
    raise ValueError(f"{sums}: has no checksum of {name}; expected a line as sha256sum writes it.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("name", help="the published name without .gz, as in train.de")
    parser.add_argument("--out", type=Path, required=True, help="the plain text to write")
    parser.add_argument("--data", type=Path, help="a folder with the files, compressed or plain, instead of a download")
    parser.add_argument("--url", default=URL, help="where the files lie (default: %(default)s)")
    parser.add_argument("--sums", type=Path, default=Path(__file__).with_name("SHA256SUMS"), help="the checksums")
    args = parser.parse_args()

    expected = checksum(args.sums, args.name)
    where = f"{args.url}/{args.name}.gz"
    if args.data:
        where, data = take(args.data, args.name)
    else:
        data = download(where)
    text = plain(where, data)
    check(where, text, expected)
    with replacing(args.out) as part:
        part.write_bytes(text)


if __name__ == "__main__":
    run(main)
