"""Saved models: safetensors files, each named by one digest of all that is in it."""

from shoal.checkpoint.model_file import digest, load_model, load_tensors, save_tensors

__all__ = ["digest", "load_model", "load_tensors", "save_tensors"]
