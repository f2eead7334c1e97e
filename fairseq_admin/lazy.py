"""When the plugin is registered: with fairseq's first import, and never without one.

`import fairseq_admin.pytorch` and `fairseq-admin --help` need no fairseq, whose import takes seconds, so the package
does not import it. Where fairseq is there already (`--user-dir`), the plugin is registered at once; otherwise as soon
as the outermost import, of fairseq or of a module of ours that needs it, is done: within one, the modules that the
plugin is made of may be half imported.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import logging
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

from .errors import install_excepthook

PACKAGE = __name__.rpartition(".")[0]


class _Registrar(importlib.abc.MetaPathFinder):
    """Sees imports of fairseq and of our own modules, and registers the plugin after the first that loads fairseq."""

    depth = 0
    """How many such imports are under way, one within the other."""

    def find_spec(self, name: str, path=None, target=None) -> ModuleSpec | None:
        if name != "fairseq" and not name.startswith(f"{PACKAGE}."):
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            self._watch(spec.loader)
        return spec

    def _watch(self, loader: importlib.abc.Loader) -> None:
        load = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            if module.__name__ == "fairseq":
                before_fairseq()
            self.depth += 1
            try:
                load(module)
            finally:
                self.depth -= 1
            if self.depth == 0 and sys.modules.get("fairseq") and self in sys.meta_path:
                sys.meta_path.remove(self)
                importlib.import_module(f"{PACKAGE}.plugin")

        loader.exec_module = exec_module  # type: ignore[method-assign]


def before_fairseq() -> None:
    """What has to be in place while fairseq's import, and the plugin's, take their seconds."""
    # On import, fairseq logs that tensorboardX is missing, which only speech needs.
    logging.getLogger("fairseq.tasks.text_to_speech").setLevel(logging.WARNING)
    install_excepthook()


def register() -> None:
    """Register the plugin: now, if fairseq is loaded, or else when it first is."""
    if sys.modules.get("fairseq"):
        before_fairseq()
        importlib.import_module(f"{PACKAGE}.plugin")
    else:
        sys.meta_path.insert(0, _Registrar())
