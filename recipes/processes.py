"""How a step does its work: a step of the text or of the plugin in this process, fairseq's commands in their own."""

from __future__ import annotations

import importlib
import io
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stdout
from pathlib import Path

from recipes.steps.common import replacing


class Failed(ValueError):
    """A command that has said itself what is wrong."""


def call(module: str, *words: object) -> None:
    """A program of ours, in this process, as `python -m recipes.MODULE words` would run it."""
    before, sys.argv = sys.argv, [module, *map(str, words)]
    try:
        importlib.import_module(f"recipes.{module}").main()
    finally:
        sys.argv = before


def plugin(*words: object, to: Path | None = None) -> str:
    """A verb of fairseq-admin, in this process; what it prints, which goes to a file if there is one.

    Raises:
        Failed: it has said why.
    """
    from fairseq_admin import cli  # with torch and fairseq, seconds that a recipe with nothing to do can spare

    printed = io.StringIO()
    with redirect_stdout(printed):
        status = cli.main([str(word) for word in words])
    if status:
        raise Failed(f"fairseq-admin {words[0]} ended with status {status}.")
    if to:
        with replacing(to) as part:
            part.write_text(printed.getvalue(), encoding="utf-8")
    else:
        print(printed.getvalue(), end="", flush=True)
    return printed.getvalue()


def stream(command: list[str], show: Callable[[Iterable[str]], Iterable[str]], log: Path, mode: str = "ab") -> None:
    """A command whose output is kept in a file and shown in short.

    Raises:
        Failed: it ended with another status than 0.
    """
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    with process, log.open(mode, buffering=0) as out:

        def lines() -> Iterator[str]:
            for line in process.stdout or ():
                out.write(line)
                yield line.decode("utf-8", "replace")

        for text in show(lines()):
            print(text, flush=True)
    if process.returncode:
        raise Failed(f"{' '.join(command[1:4])} ended with status {process.returncode}; its whole output: {log}.")
