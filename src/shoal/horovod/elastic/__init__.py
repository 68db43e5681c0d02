"""Worlds that shrink and grow while a script runs.

board     what the driver and the workers tell each other, in memory that all of them map
driver    starts workers, starts others for those that die, and says which of them are a world
place     a worker's part: waits for a world that it is in, and notices when that is over
"""
