"""A model by its layers: placed on workers, decoupled with heads of their own, or trained in turns."""
