"""How fast Shoal is beside its peers: fresh processes, variants interleaved, medians and spreads.

Beside the package and no part of it: `python -m benchmarks` in the repository's root.
"""

from benchmarks.bars import BARS, Bar, BarClaim, BarFinding, BarVerdict, Ceiling, judge
from benchmarks.compare import SpeedRow, compare
from benchmarks.measurement import Measurement, summarise
from benchmarks.table import ordeals_table, rows_table, verdicts_table
from benchmarks.variants import PEERS, VARIANTS

__all__ = [
    "BARS",
    "PEERS",
    "VARIANTS",
    "Bar",
    "BarClaim",
    "BarFinding",
    "BarVerdict",
    "Ceiling",
    "Measurement",
    "SpeedRow",
    "compare",
    "judge",
    "ordeals_table",
    "rows_table",
    "summarise",
    "verdicts_table",
]
