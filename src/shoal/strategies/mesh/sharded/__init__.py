"""The state of training cut over workers: each keeps and updates a part of it, whatever the model computes."""
