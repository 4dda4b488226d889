"""`python -m rlsync` is the `rlsync` command."""

import sys

from rlsync.runs.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
