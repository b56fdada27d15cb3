"""``python -m loosestep``: the command line."""

from loosestep.lab.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
