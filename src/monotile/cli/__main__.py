"""`python -m monotile.cli`."""

from . import main

main()
