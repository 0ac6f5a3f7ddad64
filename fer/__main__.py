"""``python -m fer`` is ``fer``."""

from __future__ import annotations

from fer.cli.entry import main

if __name__ == "__main__":
    main()
