"""The tensor axis: each worker has a part of the width of every layer that can be cut."""
