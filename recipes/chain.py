"""A recipe as a table of steps. A step has the files that it reads and writes, its settings, and its program.

A step is done if its files exist, and the keys that it and the steps before it stored are still their keys. A key is a
hash of the step's settings, its program's version, and its inputs. If a step writes the input, that step's key stands
for the input. Otherwise the hash of its content stands for it; the content is read again only if the file's size or
time of change differs. Thus a changed setting, program or input repeats the steps that depend on it, and no others.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from recipes.steps.common import write_lines
from recipes.steps.records import Settings, describe, differences, read, refuse


@dataclass(frozen=True)
class Step:
    name: str
    folder: Path
    """the folder of its key and its lock"""
    writes: tuple[Path, ...]
    program: Callable[[], object]
    reads: tuple[Path, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    version: int = 1
    """version of its program; a new version writes different output from the same input"""
    after: tuple[Path, ...] = ()
    """files that must exist before it begins, although its output does not depend on them"""
    trains: bool = False
    """it is done once its files exist, whatever its key; the folder's settings.json is compared instead"""
    optional: bool = False
    """it may write nothing, for some models or texts"""
    title: str = ""
    """printed when it runs, instead of its name"""

    @property
    def keyed(self) -> dict[str, Any]:
        """Its settings and its version. Version 1 is left out, since keys once had no version."""
        return {**self.settings, **({"version": self.version} if self.version > 1 else {})}

    @property
    def record(self) -> Path:
        return self.folder / ".keys" / f"{self.name}.json"


class Chain:
    """Steps, in an order in which every input is written before it is read."""

    def __init__(self, steps: Iterable[Step]) -> None:
        self.steps = list(steps)
        self.writer = {path: step for step in self.steps for path in step.writes}
        self._keys: dict[str, str] = {}
        self._files: dict[Path, Settings] = {}

    def _inputs(self, step: Step) -> dict[str, Settings]:
        """The files that a step reads and no step writes.

        A file that was deleted after reading counts as unchanged. A file that is still where it was read, but not in
        the user's present folder, does not.
        """
        known = read(step.record).get("inputs", {})
        paths = [path for path in step.reads if path not in self.writer]
        for path in paths:
            if path.is_file():
                known[path.name] = self._files[path] = describe(path, self._files.get(path) or known.get(path.name))
            elif path.parent.is_dir() and Path(known.get(path.name, {}).get("path", "")).is_file():
                del known[path.name]
        return {path.name: known[path.name] for path in paths if path.name in known}

    def key(self, step: Step) -> str:
        """The key that the step would store if it ran now."""
        if step.name not in self._keys:
            inputs = {name: file["sha256"] for name, file in self._inputs(step).items()}
            for writer in (self.writer[path] for path in step.reads if path in self.writer):
                inputs[writer.name] = self.key(writer)
            content = json.dumps([step.name, step.keyed, inputs], sort_keys=True)
            self._keys[step.name] = hashlib.sha256(content.encode()).hexdigest()
        return self._keys[step.name]

    def keep_versions(self) -> list[str]:
        """Accept the outputs of earlier versions of the programs. Returns the names of such steps."""
        earlier = []
        for place, step in enumerate(self.steps):
            if (record := read(step.record)) and (version := record["settings"].get("version", 1)) != step.version:
                self.steps[place] = replace(step, version=version)
                self.writer |= dict.fromkeys(step.writes, self.steps[place])
                earlier.append(step.name)
        self._keys.clear()
        return earlier

    def is_done(self, step: Step) -> bool:
        if not (step.optional or all(path.exists() for path in step.writes)):
            return False
        return step.trains or self._is_current(step)

    def _is_current(self, step: Step) -> bool:
        """Whether the last run of a step, and of every step before it, had the present key."""
        before = {self.writer[path].name: self.writer[path] for path in step.reads if path in self.writer}
        current = (one.trains or not one.record.exists() or self._is_current(one) for one in before.values())
        return read(step.record).get("key") == self.key(step) and all(current)

    def plan(self, goals: Iterable[Path]) -> list[Step]:
        """The steps that would run to make the goals, in order. Inputs that only finished steps need are not made."""
        wanted: set[str] = set()
        pending = list(goals)
        while pending:
            step = self.writer.get(pending.pop())
            if step and step.name not in wanted and not self.is_done(step):
                wanted.add(step.name)
                pending += [*step.reads, *step.after]
        return [step for step in self.steps if step.name in wanted]

    def changes(self, step: Step) -> list[str]:
        """How the settings and inputs of a step differ from those of its last run."""
        if not (record := read(step.record)):
            return []
        return differences({**record["settings"], **record["inputs"]}, {**step.keyed, **self._inputs(step)})

    def make(self, goals: Iterable[Path], models: Path | None = None) -> None:
        """Run the planned steps.

        Args:
            models: a folder. If it contains a model, changed steps are refused: the model depends on their output.

        Raises:
            ValueError: changed steps are refused, or a step failed.
        """
        plan = self.plan(goals)
        changes = {step.name: self.changes(step) for step in plan}
        if models and plan:
            refuse(plan[-1].folder, sum(changes.values(), []), models)
        for step in plan:
            why = f" ({'; '.join(changes[step.name])})" if changes[step.name] else ""
            print(f"# {step.title or step.name}{why}", flush=True)
            if record := read(step.record):  # its files are about to change: a kill must not leave the old key
                write_lines(step.record, [json.dumps({**record, "key": ""}, indent=1)])
            step.program()
            self.keep(step)

    def keep(self, step: Step) -> None:
        """Store the key of a step that has run."""
        self._keys.clear()
        record = {"key": self.key(step), "settings": step.keyed, "inputs": self._inputs(step)}
        write_lines(step.record, [json.dumps(record, indent=1)])

    def table(self, goals: Iterable[Path]) -> list[str]:
        """A line for each step that says whether it would run."""
        planned = {step.name for step in self.plan(goals)}
        rows = [("run" if step.name in planned else "-", step.title or step.name, step) for step in self.steps]
        width = max(len(title) for _, title, _ in rows)
        return [f"{state:4} {title:{width}}  {step.writes[0]}" for state, title, step in rows]

    def files(self) -> Settings:
        """The sources of the text: the files that no step writes. Keys are their names without .gz."""
        inputs = (read(step.record).get("inputs", {}) for step in self.steps)
        return {name.removesuffix(".gz"): file for files in inputs for name, file in files.items()}
