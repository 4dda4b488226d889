"""The notebooks of the docs, and what else happens in a notebook, in one real Jupyter kernel."""

from __future__ import annotations

import json
import queue
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import psutil
import pytest
from jupyter_client import KernelManager

from tests.conftest import may_start_processes
from tests.tools.processes import wait_until

NOTEBOOKS = Path(__file__).parents[2] / "docs" / "notebooks"
#: The machine may be busy.
WITHIN_S = 150.0

pytestmark = [pytest.mark.processes, pytest.mark.seconds]


class Notebook:
    """A kernel, and what a person sees below a cell."""

    def __init__(self, folder: Path) -> None:
        self.manager = KernelManager(kernel_name="here")
        self.manager.start_kernel(cwd=str(folder))
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=WITHIN_S)

    def run(self, cell: str, interrupts: int = 0) -> str:
        """Run a cell, and press the stop button so often, once it has shown that a training goes on."""
        asked = self.client.execute(cell)
        began_s = time.monotonic()
        shown = ""
        while time.monotonic() - began_s < WITHIN_S:
            try:
                message = self.client.get_iopub_msg(timeout=1)
            except queue.Empty:
                continue
            if message["parent_header"].get("msg_id") != asked:
                continue
            if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                return shown
            shown += text_of(message["content"])
            if interrupts and "frames/s" in shown:
                self._interrupt(interrupts)
                interrupts = 0
        raise AssertionError(f"the cell has not ended:\n{shown}")

    def _interrupt(self, times: int) -> None:
        self.manager.interrupt_kernel()
        for number in range(1, times):
            threading.Timer(0.3 * number, self.manager.interrupt_kernel).start()

    def children(self) -> list[str]:
        """What the kernel has started, but for the fork server, which serves every cell."""
        kernel = psutil.Process(self.manager.provisioner.pid)
        others = []
        for child in kernel.children():
            serves = ("resource_tracker", "forkserver")
            commands = " ".join(child.cmdline())
            if any(word in commands for word in serves):
                others += [worker.name() for worker in child.children()]  # they are forked from it
            else:
                others.append(commands)
        return others

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


def text_of(content: dict[str, Any]) -> str:
    """What a message shows."""
    if "ename" in content:
        return f"{content['ename']}: {content['evalue']}\n"
    return content.get("text") or content.get("data", {}).get("text/plain", "")


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Kernels of this interpreter, by the name "here"; and a folder for them."""
    folder = tmp_path_factory.mktemp("notebook")
    spec = folder / "kernels" / "here" / "kernel.json"
    spec.parent.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec.write_text(json.dumps({"argv": command, "display_name": "here", "language": "python"}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_PATH", str(folder))
        patch.setenv("IPYTHONDIR", str(folder))
        patch.setenv("PYTHONPATH", str(NOTEBOOKS.parents[1]))
        yield folder


@pytest.fixture(scope="module")
def notebook(kernels: Path) -> Iterator[Notebook]:
    with pytest.MonkeyPatch.context() as patch, may_start_processes():
        patch.delenv("PYTEST_CURRENT_TEST")  # else a kernel does not show what is written past Python
        opened = Notebook(kernels)
        try:
            yield opened
        finally:
            opened.close()


@pytest.mark.parametrize("name", ["first_training", "own_trainer", "look_into_a_run", "use_a_policy"])
@pytest.mark.one_case
@pytest.mark.usefixtures("kernels")
def test_a_notebook_of_the_docs_runs_from_top_to_bottom(name: str, tmp_path: Path) -> None:
    read = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(read, timeout=WITHIN_S, kernel_name="here", resources=resources).execute()


def test_there_is_a_test_of_each_notebook() -> None:
    names = test_a_notebook_of_the_docs_runs_from_top_to_bottom.pytestmark[-1].args[1]
    assert sorted(names) == sorted(file.stem for file in NOTEBOOKS.glob("*.ipynb"))


ENDLESS = """
from rlsync.runs import train
train("recipe.total_frames=100000000", "recipe.target_return=null", run_dir={folder!r})
"""


@pytest.mark.parametrize("presses", [2, 1])
@pytest.mark.one_case
def test_the_stop_button_ends_a_run_and_leaves_the_kernel_and_nothing_else(
    presses: int, notebook: Notebook
) -> None:
    shown = notebook.run(ENDLESS.format(folder=f"stopped-{presses}"), interrupts=presses)
    assert "KeyboardInterrupt" in shown
    assert "Ctrl-C again ends it at once" in shown
    assert wait_until(lambda: not notebook.children(), WITHIN_S)
    look = "from rlsync.runs import RunResult; print(RunResult.of('stopped-{0}').how, 'alive')"
    assert "interrupted alive" in notebook.run(look.format(presses))


@pytest.mark.thorough
def test_a_cell_that_is_run_three_times_leaves_nothing(notebook: Notebook) -> None:
    cell = """
from rlsync.runs import train
import os
result = train("recipe.total_frames=2048")
print(result.status, "descriptors", len(os.listdir("/proc/self/fd")))
"""
    counts = []
    for _ in range(3):
        counts.append(int(notebook.run(cell).rpartition("descriptors")[2]))
        assert wait_until(lambda: not notebook.children(), WITHIN_S)
    assert counts[2] <= counts[1] + 2


def test_a_thread_trains_while_cells_run(notebook: Notebook) -> None:
    begin = """
import threading
from rlsync.runs import train
results = []
thread = threading.Thread(target=lambda: results.append(train("recipe.total_frames=4096")))
thread.start()
"""
    notebook.run(begin)
    assert "in between" in notebook.run("print('in between')")
    assert "total_frames collected" in notebook.run("thread.join(); print(results[0].how)")


@pytest.mark.thorough
def test_a_restart_of_the_kernel_ends_a_run(kernels: Path) -> None:
    notebook = Notebook(kernels)
    try:
        notebook.client.execute(ENDLESS.format(folder="restarted"))
        assert wait_until(lambda: len(notebook.children()) > 1, WITHIN_S)
        started = psutil.Process(notebook.manager.provisioner.pid).children(recursive=True)
        notebook.manager.restart_kernel(now=True)
        notebook.client.wait_for_ready(timeout=WITHIN_S)
        _, alive = psutil.wait_procs(started, WITHIN_S)
        assert not alive
    finally:
        notebook.close()
