"""How fast Shoal is beside its peers: fresh processes, variants interleaved, medians and spreads.

Beside the package and no part of it: `python -m benchmarks` in the repository's root.
"""
