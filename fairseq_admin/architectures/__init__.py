"""The registered models, and their options."""
