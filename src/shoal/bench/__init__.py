"""How fast Shoal is beside its peers: fresh processes, variants interleaved, medians and spreads."""

from shoal.bench.bars import BARS, Bar, BarClaim, BarFinding, BarVerdict, Ceiling, judge
from shoal.bench.compare import SpeedRow, compare
from shoal.bench.measurement import Measurement, summarise
from shoal.bench.table import ordeals_table, rows_table, verdicts_table
from shoal.bench.variants import PEERS, VARIANTS

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
