"""A recipe as a table of steps. A step has the files that it reads and writes, its settings, and its program.

A step is done when its files are there and its last key is today's. A key is a hash of the step's settings, of its
program's version, and of the keys of what it reads; of a file that no step writes, of its content, which is read again
only if the file's size or time of change differs. So a changed setting, program or input makes again what depends on
it, and nothing else.
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
    """where its key is kept, and its lock"""
    writes: tuple[Path, ...]
    program: Callable[[], object]
    reads: tuple[Path, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    version: int = 1
    """of its program: a higher one writes something else from the same input"""
    after: tuple[Path, ...] = ()
    """files that must be there before it begins, though it does not depend on them"""
    trains: bool = False
    """it is done once its files are there, whatever its key; its folder's settings.json is compared first"""
    fetches: bool = False
    """it fetches a file that counts by its content, and is needed only by a step that runs"""
    optional: bool = False
    """it may write nothing, for some models or texts"""
    title: str = ""
    """printed when it runs, in place of its name"""

    @property
    def keyed(self) -> dict[str, Any]:
        """Its settings with its version, which is left out where it is 1: keys of before had none."""
        return {**self.settings, **({"version": self.version} if self.version > 1 else {})}

    @property
    def kept(self) -> Path:
        return self.folder / ".keys" / f"{self.name}.json"


class Chain:
    """Steps, each after those that write what it reads."""

    def __init__(self, steps: Iterable[Step]) -> None:
        self.steps = list(steps)
        self.writer = {path: step for step in self.steps for path in step.writes}
        self._keys: dict[str, str] = {}
        self._files: dict[Path, Settings] = {}

    def kept(self, step: Step) -> dict[str, Any]:
        """The key, settings and inputs that it kept when it was last done."""
        return read(step.kept)

    def _inputs(self, step: Step) -> dict[str, Settings]:
        """The files that it reads and no step writes. One that has gone since it was read counts as unchanged."""
        known = self.kept(step).get("inputs", {})
        paths = [path for path in step.reads if path not in self.writer or self.writer[path].fetches]
        for path in filter(Path.is_file, paths):
            known[path.name] = self._files[path] = describe(path, self._files.get(path) or known.get(path.name))
        return {path.name: known[path.name] for path in paths if path.name in known}

    def key(self, step: Step) -> str:
        """The key of the step as it would be done now."""
        if step.name not in self._keys:
            inputs = {name: file["sha256"] for name, file in self._inputs(step).items()}
            for path in step.reads:
                writer = self.writer.get(path)
                if writer and not writer.fetches:
                    inputs[writer.name] = self.key(writer)
            content = json.dumps([step.name, step.keyed, inputs], sort_keys=True)
            self._keys[step.name] = hashlib.sha256(content.encode()).hexdigest()
        return self._keys[step.name]

    def keep_versions(self) -> list[str]:
        """Accept the outputs of earlier versions of the programs; the names of such steps."""
        earlier = []
        for place, step in enumerate(self.steps):
            if (kept := self.kept(step)) and (version := kept["settings"].get("version", 1)) != step.version:
                self.steps[place] = replace(step, version=version)
                self.writer |= dict.fromkeys(step.writes, self.steps[place])
                earlier.append(step.name)
        self._keys.clear()
        return earlier

    def is_done(self, step: Step) -> bool:
        if not (step.optional or all(path.exists() for path in step.writes)):
            return False
        return step.fetches or step.trains or self.kept(step).get("key") == self.key(step)

    def plan(self, goals: Iterable[Path]) -> list[Step]:
        """The steps that would run for some files, in their order; not those that only steps that are done read."""
        wanted: set[str] = set()
        pending = list(goals)
        while pending:
            step = self.writer.get(pending.pop())
            if step and step.name not in wanted and not self.is_done(step):
                wanted.add(step.name)
                pending += [*step.reads, *step.after]
        return [step for step in self.steps if step.name in wanted]

    def changes(self, step: Step) -> list[str]:
        """The differences of its settings and inputs from those of the last time."""
        if not (kept := self.kept(step)):
            return []
        return differences({**kept["settings"], **kept["inputs"]}, {**step.keyed, **self._inputs(step)})

    def make(self, goals: Iterable[Path], models: Path | None = None) -> None:
        """Run the planned steps.

        Args:
            models: the folder of the models that depend on it; once there is one, nothing is made again.

        Raises:
            ValueError: it would be; or a step's own.
        """
        plan = self.plan(goals)
        changes = {step.name: self.changes(step) for step in plan}
        if models and plan:
            refuse(plan[-1].folder, sum(changes.values(), []), models)
        for step in plan:
            why = f" ({'; '.join(changes[step.name])})" if changes[step.name] else ""
            print(f"# {step.title or step.name}{why}", flush=True)
            step.program()
            self.keep(step)

    def keep(self, step: Step) -> None:
        """Write the step's key, after everything else."""
        self._keys.clear()
        kept = {"key": self.key(step), "settings": step.keyed, "inputs": self._inputs(step)}
        write_lines(step.kept, [json.dumps(kept, indent=1)])

    def table(self, goals: Iterable[Path]) -> list[str]:
        """A line for each step: whether it would run or is done."""
        planned = {step.name for step in self.plan(goals)}
        rows = [("run" if step.name in planned else "-", step.title or step.name, step) for step in self.steps]
        width = max(len(title) for _, title, _ in rows)
        return [f"{state:4} {title:{width}}  {step.writes[0]}" for state, title, step in rows]

    def files(self) -> Settings:
        """The files that no step makes, by their names unpacked: those that the text was read from."""
        inputs = (self.kept(step).get("inputs", {}) for step in self.steps)
        return {name.removesuffix(".gz"): file for files in inputs for name, file in files.items()}
