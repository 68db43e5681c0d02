"""How fast Shoal is beside its peers: fresh processes, variants interleaved, medians and spreads."""

from shoal.bench.bars import BARS, Bar, Ceiling, Claim, Finding, Verdict, judge
from shoal.bench.compare import Row, compare
from shoal.bench.measurement import Measurement, summarise
from shoal.bench.table import ordeals_table, rows_table, verdicts_table
from shoal.bench.variants import PEERS, VARIANTS

__all__ = [
    "BARS",
    "PEERS",
    "VARIANTS",
    "Bar",
    "Ceiling",
    "Claim",
    "Finding",
    "Measurement",
    "Row",
    "Verdict",
    "compare",
    "judge",
    "ordeals_table",
    "rows_table",
    "summarise",
    "verdicts_table",
]
