"""Runs the notebooks of docs/notebooks in kernels of their own, and writes what they print into them.

`make notebooks` calls it after a change of theirs; a test runs them, and compares nothing.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import nbclient
import nbformat

FOLDER = Path(__file__).parent / "notebooks"


def run(file: Path) -> None:
    """Run one notebook in a folder that is thrown away; what goes to stderr is not shown."""
    notebook = nbformat.read(file, as_version=4)
    with tempfile.TemporaryDirectory(prefix="rlsync-") as folder:
        resources = {"metadata": {"path": folder}}
        nbclient.NotebookClient(notebook, timeout=300, resources=resources).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # when it was run
        if cell.cell_type == "code":
            cell.outputs = [shown for shown in cell.outputs if shown.get("name") != "stderr"]
    nbformat.write(notebook, file)


def main() -> int:
    for file in sorted(FOLDER.glob("*.ipynb")):
        sys.stdout.write(f"{file.name}\n")
        run(file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
