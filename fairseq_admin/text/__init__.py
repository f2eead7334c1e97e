"""From raw text to a model's units and back."""

JOINERS = "\u200c\u200d"
"""Zero-width non-joiner and joiner: spelling in Persian and in the scripts of India, and what ties emoji together."""
