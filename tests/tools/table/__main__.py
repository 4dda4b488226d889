"""Observe every row, and write the tables: `python -m tests.tools.table`."""

import multiprocessing

from tests.tools.table.page import write

if __name__ == "__main__":
    multiprocessing.set_start_method("fork", force=True)  # milliseconds for a worker, as in the tests
    write()
