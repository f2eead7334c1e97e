"""Hold a folder to one set of settings: refuse to mix results of two.

    python -m recipes.steps.settings runs/demo/admin-cpu-s1/settings.json layers=18 width=64 ...

The file is written once and then only compared with, so what depends on it is not made again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from recipes.steps.common import read_lines, run, write_lines


def hold(path: Path, settings: dict[str, str]) -> None:
    """Write the settings next to the results, or check that they are the ones written there.

    Raises:
        ValueError: they differ.
    """
    if not path.exists():
        write_lines(path, [json.dumps(settings, indent=2)])
        return
    held = json.loads("\n".join(read_lines(path)))
    changed = [
        f"{name} {held.get(name, 'unset')} -> {settings.get(name, 'unset')}"
        for name in sorted(held.keys() | settings.keys())
        if held.get(name) != settings.get(name)
    ]
    if changed:
        raise ValueError(
            f"{path.parent} was made with other settings ({'; '.join(changed)}). Go on with the old ones, remove the "
            "folder, or write elsewhere with RUNS=."
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("settings", nargs="+", metavar="NAME=VALUE")
    args = parser.parse_args()
    hold(args.file, dict(setting.split("=", 1) for setting in args.settings))


if __name__ == "__main__":
    run(main)
