"""How much memory a worker needs, may use and has used."""
