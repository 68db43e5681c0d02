"""Models that are larger than the process that builds them: parameters wait in a file."""
