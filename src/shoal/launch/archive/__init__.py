"""A copy of a run at a URL: put there while it trains, and fetched from there to go on elsewhere."""
