"""Package metadata. How to install without the Makefile: docs/limits.md."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).resolve().parent
# fairseq_admin/text/moses.py replaces rules inside sacremoses, seen in 0.2.0: another minor version may name or use
# them in another way, and would tokenise differently without an error. Before raising this, read its rules and run
# tests/test_text.py.
TEXT = ["sacremoses>=0.2,<0.3", "regex", "fastBPE"]
# The newest official release neither installs with pip >= 24.1 nor imports on Python >= 3.11; fairseq-fixed is its main
# branch with only that fixed. It is an extra, so that another fork of fairseq is not overwritten.
FAIRSEQ = ["fairseq-fixed>=0.12.3.1", "sacrebleu>=2.0", "fastBPE"]
EXPORT = ["ctranslate2>=4.8.1", "transformers>=5", "safetensors"]
DEV = [
    "accelerate",
    "build",
    "check-jsonschema",
    "hypothesis",
    "mkdocs-material",
    "mypy",
    "playwright",
    "pytest",
    "pytest-timeout",
    "pytest-xdist",
    "ruff",
    "subword-nmt",
    "twine",
]
DEV += ["types-requests", "types-tqdm", "uv"]
# fairseq-fixed comes as source and is built with these.
BUILD = ["cython", "numpy", "setuptools>=64", "wheel"]
# urllib3 2.2 is the first with HTTPResponse.read1.
DOWNLOAD = ["filelock>=4.2", "requests", "urllib3>=2.2"]
ANALYSIS = ["matplotlib"]
REPORT = [*ANALYSIS, "jinja2"]
RECIPES = [
    *FAIRSEQ,
    *TEXT,
    *DOWNLOAD,
    *REPORT,
    "Babel",
    "num2words",
    "pydantic>=2.10",  # the first whose defaults may depend on other fields
    "pyyaml",
    "scipy",
    "tabulate",
    "tensorboardX",
    "tokenizers>=0.23",  # the first that says how far it is
]

setup(
    name="fairseq-admin",
    version=re.search(r'__version__ = "(.+?)"', (HERE / "fairseq_admin/version.py").read_text())[1],
    description="Train very deep Post-LN Transformers with Admin, in PyTorch or through stock fairseq-train",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="MIT",
    package_dir={"": "."},  # an editable install is then this folder on the path, where hydra looks for its plugins
    packages=[*find_packages(include=["fairseq_admin", "fairseq_admin.*"]), "hydra_plugins.fairseq_admin"],
    package_data={"fairseq_admin": ["py.typed"], "fairseq_admin.report": ["page.*"]},
    python_requires=">=3.11",
    install_requires=["torch>=2.6", "tqdm"],  # of fairseq_admin.pytorch; FAIRSEQ has the rest
    extras_require={
        "fairseq": FAIRSEQ,
        "text": TEXT,
        "export": [*TEXT, *EXPORT],
        "analysis": ANALYSIS,
        "report": REPORT,
        "recipes": RECIPES,
        "dev": [*RECIPES, *EXPORT, *DEV, *BUILD],
    },
    entry_points={"console_scripts": ["fairseq-admin=fairseq_admin.cli:main"]},
)
