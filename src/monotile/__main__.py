"""`python -m monotile`: the same as the `monotile` command."""

from .cli import main

if __name__ == "__main__":
    main()
