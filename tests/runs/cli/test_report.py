"""``rlsync report``: one file that says what was trained, how it ended, and how it is made again."""

from __future__ import annotations

import re
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlsync.runs import train
from rlsync.runs.cli.main import main
from rlsync.runs.cli.report import address_of, served
from tests.runs.cli.test_train_call import HERE

pytestmark = pytest.mark.seconds


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Two runs that differ in their seeds alone; one has a name that HTML would read."""
    at = tmp_path_factory.mktemp("report")
    for seed, name in enumerate(("one", "<b>two</b> & co")):
        train(*HERE, "recipe.total_frames=1024", "recipe.gamma=0.97", seed=seed, run_dir=str(at / name))
    return at


def test_a_page_of_two_runs_says_what_they_were_and_needs_no_network(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "both.html"
    assert main(["report", str(folder / "one"), str(folder / "<b>two</b> & co"), "-o", str(out)]) == 0
    text = out.read_text()
    links = re.findall(r"(?:src|href)=\"([^\"]*)", text)
    assert [link for link in links if not link.startswith(("#", "data:image/"))] == []
    assert text.isascii()
    assert "&#8211;" in text, "what is not known is a dash"
    assert "<b>two" not in text
    assert "&lt;b&gt;two&lt;/b&gt; &amp; co" in text
    assert text.count("total_frames collected") == 2
    assert "CartPole-v1, 2 seeds. Returns of the newest episodes: mean" in text
    assert text.count("<svg") == 2, "one for each width"
    assert text.count("data:image/png") == 2, "each run has a timeline of its own"
    assert "<tr><td>recipe.gamma</td><td>0.99</td><td>0.97</td></tr>" in text
    assert f"rlsync rerun {folder}/one" in text
    assert "torchrl 0." in text
    assert capsys.readouterr().out == f"written   {out}\n"


def test_a_page_of_one_run_lies_in_its_folder(folder: Path) -> None:
    assert main(["report", str(folder / "one")]) == 0
    text = (folder / "one" / "report.html").read_text()
    assert "interquartile mean" not in text
    assert "<title>ppo on CartPole-v1, seed 0</title>" in text


def test_what_is_no_run_or_no_page_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(folder)]) == 2
    assert "is not the folder of a run" in capsys.readouterr().err
    assert main(["report", str(folder / "one"), "-o", str(folder / "page.pdf")]) == 2
    assert "end it in .html" in capsys.readouterr().err


def test_the_live_page_is_for_this_machine_and_can_only_be_read(folder: Path) -> None:
    with served({"one": folder / "one"}) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = address_of(server)
        assert server.server_address[0] == "127.0.0.1"
        with urllib.request.urlopen(address, timeout=60) as answer:
            text = answer.read().decode()
        assert '<meta http-equiv="refresh" content="5">' in text
        others = [
            urllib.request.Request(f"{address}../../etc/passwd"),
            urllib.request.Request(address, headers={"Host": "rebound.example"}),
            urllib.request.Request(address, data=b"x", method="POST"),
        ]
        for request in others:
            with pytest.raises(urllib.error.HTTPError):
                urllib.request.urlopen(request, timeout=60)
        server.shutdown()
