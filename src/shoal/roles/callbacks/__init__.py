"""How callbacks are told what happens, and what becomes of what they ask for."""
