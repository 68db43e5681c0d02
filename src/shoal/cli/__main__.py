"""`python -m shoal.cli`: the `shoal` command."""

from shoal.cli import main

main()
