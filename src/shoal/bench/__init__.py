"""How fast Shoal is beside its peers: fresh processes, variants interleaved, medians and spreads."""

from shoal.bench.bars import BARS, Bar, Ceiling, Finding, Verdict, judge
from shoal.bench.compare import Row, compare
from shoal.bench.measurement import Measurement, summarise
from shoal.bench.table import rows_table, verdicts_table
from shoal.bench.variants import PEERS, VARIANTS

__all__ = [
    "BARS",
    "PEERS",
    "VARIANTS",
    "Bar",
    "Ceiling",
    "Finding",
    "Measurement",
    "Row",
    "Verdict",
    "compare",
    "judge",
    "rows_table",
    "summarise",
    "verdicts_table",
]
