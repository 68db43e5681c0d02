"""How the workers of a run come together."""
