"""What every process of a run has: signs of life, what it tells and hears, how it fails."""
