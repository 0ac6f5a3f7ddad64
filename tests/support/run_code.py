"""``python -m tests.support.run_code CODE``: what ``python -c CODE`` does, for children that are forked."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    exec(sys.argv[1], {"__name__": "__main__"})
