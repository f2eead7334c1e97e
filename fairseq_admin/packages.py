"""Packages that some verbs need and a plain installation lacks."""

from __future__ import annotations

import importlib
from typing import Any

from .errors import AdminError

REQUIREMENTS = {
    "sacremoses": "'sacremoses>=0.2,<0.3' regex",
    "jinja2": "jinja2",
    "matplotlib": "matplotlib, or give analyze --json for the numbers alone",
    "ctranslate2": "'ctranslate2>=4.8.1'",
    "transformers": "'transformers>=5' safetensors",
}
"""What to install for each, as setup.py has it."""


def need(package: str) -> Any:
    """The package, imported.

    Raises:
        AdminError: it is not installed.
    """
    try:
        return importlib.import_module(package)
    except ImportError:
        raise AdminError(f"{package} is not installed. Run pip install {REQUIREMENTS[package]}.") from None
