"""The plugin's files without the plugin: `recipes.plugin.text.tokens` is fairseq_admin/text/tokens.py.

Importing fairseq_admin registers its models, with torch and fairseq, which takes seconds; a step of the text needs
neither. Only files that import nothing but the standard library and their own tools are of use here.
"""

from pathlib import Path

__path__ = [str(Path(__file__).parents[2] / "fairseq_admin")]
