"""Packages that some commands need and a plain installation lacks."""

from __future__ import annotations

import importlib
from typing import Any

from .errors import AdminError

REQUIREMENTS = {
    "fairseq": "'fairseq-admin[fairseq]' (docs/limits.md, Installing)",
    "sacremoses": "'sacremoses>=0.2,<0.3' regex",
    "fastBPE": "fastBPE, which needs a C++ compiler",
    "jinja2": "jinja2",
    "matplotlib": "matplotlib, or give analyze --json for the numbers alone",
    "ctranslate2": "'ctranslate2>=4.8.1'",
    "transformers": "'transformers>=5' safetensors",
}
"""The argument of `pip install` for each package, as in setup.py."""


def need(package: str) -> Any:
    """Import a package.

    Args:
        package: a key of `REQUIREMENTS`.

    Returns:
        The module.

    Raises:
        AdminError: the package is not installed.
    """
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError:
        raise AdminError(f"{package} is not installed. Run pip install {REQUIREMENTS[package]}.") from None
