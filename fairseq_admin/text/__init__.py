"""From raw text to a model's units and back."""
