"""The documentation is true: its Python runs, its commands parse, its links lead somewhere."""

from __future__ import annotations

import argparse
import doctest
import importlib
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from importlib.metadata import requires
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml
from packaging.requirements import Requirement
from sybil import Document
from sybil.parsers.myst import PythonCodeBlockParser
from torchrl.collectors import Collector

import rlsync
from rlsync.runs.cli.main import VERBS
from rlsync.runs.recipes import impala
from tests.tools.parts.configs import configs_of
from tests.tools.programs import ENDS_WITHIN_S, run_program
from tests.tools.running import in_three_lines
from tests.tools.tiers import first_of_each

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
BUILT = DOCS / "_build"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
PAGES += [page for page in sorted(DOCS.rglob("*.md")) if not page.is_relative_to(BUILT)]

FENCED = re.compile(r"^( *)```(\S*)[^\n]*\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
CHECKED = {"python", "sh", "console", "diff", "{literalinclude}"}
NOT_RUN = {"text", "yaml", "toml", "{toctree}", "{eval-rst}", "{config-keys}", "{include}"}


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> list[tuple[str, str]]:
    """Language and content of every fenced block of a page."""
    return [(language, textwrap.dedent(body)) for _, language, body in FENCED.findall(page.read_text())]


def with_a(*languages: str) -> list[Path]:
    return [page for page in PAGES if any(language in languages for language, _ in blocks(page))]


def each(page: Path) -> Any:
    """A case; `make test` leaves out the pages whose blocks start many workers."""
    many = page.parent.name == "how_to" or page.name == "migration.md"
    return pytest.param(page, marks=pytest.mark.thorough if many else ())


# ------------------------------------------------------------------------------------------- Python


@pytest.mark.usefixtures("fork_workers")
@pytest.mark.parametrize("page", [each(page) for page in with_a("python")], ids=name_of)
def test_the_python_of_a_page_runs_from_top_to_bottom(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One page, one test: what a block starts, a later block of the page ends.

    The pages go on from the quickstart: what its script defines, they have.
    """
    monkeypatch.chdir(tmp_path)
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    document = Document.parse(str(page), PythonCodeBlockParser(doctest_optionflags=options))
    exec(quickstart(), document.namespace)
    for example in document.examples():
        example.evaluate()


README_PYTHON = [body for language, body in blocks(ROOT / "README.md") if language == "python"]
_AT_BATCH = 3


@pytest.mark.processes
@pytest.mark.usefixtures("fork_workers")
@pytest.mark.parametrize("snippet", range(len(README_PYTHON)))
@pytest.mark.parametrize(
    ("sent", "error", "says"),
    [
        (signal.SIGKILL, rlsync.WorkerLost, "killed by SIGKILL, acted with version"),
        (signal.SIGSTOP, rlsync.AdoptionTimeout, "has not begun a rollout for 3 s"),
    ],
)
@pytest.mark.each_value
def test_a_snippet_of_the_readme_ends_in_three_lines_if_a_worker_is_killed_or_stopped(
    snippet: int,
    sent: signal.Signals,
    error: type[rlsync.RlsyncError],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if sent == signal.SIGSTOP:
        monkeypatch.setitem(rlsync.BoardScheme.__init__.__kwdefaults__, "silent_timeout_s", 3.0)
    namespace: dict[str, Any] = {"__name__": "snippet"}
    exec(quickstart(), namespace)
    make_loss, losses = namespace["make_loss"], []

    def make_watched_loss() -> Any:
        loss = make_loss()
        loss.register_forward_pre_hook(lambda *_: losses.append(0) or send())
        return loss

    def send() -> None:
        if len(losses) == _AT_BATCH:
            os.kill(namespace["collector"].procs[1].pid, sent)

    namespace["make_loss"] = make_watched_loss
    with pytest.raises(error) as ended:
        exec(README_PYTHON[snippet], namespace)
    assert says in ended.value.what
    assert in_three_lines(ended.value)
    assert "worker 1 (pid " in ended.value.what
    assert namespace["collector"].closed


PORTS = [body for language, body in blocks(DOCS / "migration.md") if language == "diff"]
#: What the ports of TorchRL's scripts pass to a collector of worker processes, each combination once.
PORTED_ARGUMENTS = sorted({" ".join(re.findall(r"^\+ +(\w+=.*,)$", port, re.MULTILINE)) for port in PORTS})


@pytest.mark.seconds
@pytest.mark.processes
@pytest.mark.usefixtures("fork_workers")
@pytest.mark.parametrize(
    "arguments", [given for given in PORTED_ARGUMENTS if '{"policy": BoardScheme' in given]
)
@pytest.mark.one_case
def test_what_a_port_of_a_script_of_torchrl_adds_makes_a_collector_whose_frames_name_versions(
    arguments: str,
) -> None:
    namespace: dict[str, Any] = {}
    exec(quickstart(), namespace)
    exec(f"added = dict({arguments})", namespace)
    collector = Collector(
        create_env_fn=namespace["make_env"](),
        policy=namespace["make_loss"]().actor_network,
        frames_per_batch=100,
        total_frames=300,
        **{"backend": "process", "num_collectors": 2, "sync": False} | namespace["added"],
    )
    acted = []
    for batch in collector:
        acted.append(set(batch["policy_version"].flatten().tolist()))
        collector.update_policy_weights_()
    assert all(versions <= {1, 2, 3} for versions in acted)
    if "sync=True" in arguments:
        assert acted == [{1}, {2}, {3}]
    collector.shutdown()


def quickstart() -> str:
    """The script on the page of that name."""
    (script,) = (body for _, body in blocks(DOCS / "quickstart.md") if "__main__" in body)
    return script


@pytest.mark.thorough
def test_the_script_of_the_quickstart_runs_as_a_file_with_spawned_workers(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(quickstart())
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=ENDS_WITHIN_S,
        check=True,
    )
    assert "versions that acted: [2, 2, 3, 3, 4]" in done.stdout


@pytest.mark.slow
@pytest.mark.thorough
def test_the_commands_of_the_quickstart_look_at_the_trainer_of_its_script(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(quickstart())
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    told = []
    for page, words in OF_RLSYNC:
        if page == "docs/quickstart.md" and any("train.py:" in word for word in words):
            done = run_program("rlsync", *words, cwd=tmp_path, env=environment)
            assert done.returncode == 0, done.stderr
            told.append(done.stdout)
    explained, examined = told
    assert "loss_module.actor_network" in explained
    assert examined.count("the weights arrive") == 2


def test_every_block_is_run_or_of_a_kind_that_cannot_be() -> None:
    odd = {(name_of(page), language) for page in PAGES for language, _ in blocks(page)}
    assert not {(page, language) for page, language in odd if language not in CHECKED | NOT_RUN}


# ----------------------------------------------------------------------------------------- commands


def commands() -> Iterator[tuple[str, list[str]]]:
    """Every command of every shell block, as words, with the page it stands on."""
    for page in PAGES:
        for language, body in blocks(page):
            if language not in ("sh", "console"):
                continue
            for line in body.replace("\\\n", " ").splitlines():
                if language == "sh" or line.startswith("$ "):
                    words = shlex.split(line.removeprefix("$ "), comments=True)
                    if words:
                        yield name_of(page), words


ALL_COMMANDS = list(commands())
OF_RLSYNC = [(page, words[1:]) for page, words in ALL_COMMANDS if words[0] == "rlsync"]


class Parsed(Exception):
    """A command line was understood; nothing of it is carried out."""


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("page", "words"),
    first_of_each(OF_RLSYNC, lambda case: case[1][0]),
    ids=[f"{p}: {' '.join(w)}" for p, w in OF_RLSYNC],
)
def test_every_rlsync_command_of_the_documentation_is_understood(
    page: str, words: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    verb, *arguments = words
    if any("my_package" in word for word in words):
        write_my_package(tmp_path)
        monkeypatch.syspath_prepend(tmp_path)
    if verb in ("--help", "--version"):
        return
    if any(word.startswith(("hydra/sweeper=", "hydra/launcher=")) for word in words):
        pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason="needs hydra-optuna-sweeper")
    assert verb in VERBS
    if takes_overrides(verb, arguments):
        there = [a for a in arguments if a != "--json" and not a.startswith("resume=")]
        configs_of(*there)
        return
    for name in ("parse_args", "parse_known_intermixed_args"):
        understand = getattr(argparse.ArgumentParser, name)

        def parse_only(self: argparse.ArgumentParser, *given: object, then: Any = understand) -> None:
            then(self, *given)
            raise Parsed

        monkeypatch.setattr(argparse.ArgumentParser, name, parse_only)
    with pytest.raises(Parsed):
        importlib.import_module(f"rlsync.runs.cli.{verb}").main(arguments)


def write_my_package(folder: Path) -> None:
    """The package that pages call ``my_package``: its functions are those of the page about environments."""
    package = folder / "my_package"
    package.mkdir()
    (functions,) = (body for lang, body in blocks(DOCS / "how_to" / "environments.md") if lang == "python")
    (package / "envs.py").write_text(functions)
    lines = [
        "import gymnasium",
        "from my_package.envs import make",
        "from tests.tools.parts.made_envs import Scaled",
        "gymnasium.register('MyEnv-v0', make)",
    ]
    (package / "__init__.py").write_text("\n".join(lines))


def takes_overrides(verb: str, arguments: list[str]) -> bool:
    return verb in ("train", "explain", "check") and not any(".py:" in a or a == "--help" for a in arguments)


def test_every_other_command_names_what_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page, words in ALL_COMMANDS:
        match words:
            case ["make", target, *_]:
                assert target in targets, (page, words)
            case ["python", "-m", "pip", *_]:
                pass  # files of the reader's
            case ["python" | "pytest", *rest]:
                files = [word.partition("::")[0] for word in rest if "/" in word]
                assert all((ROOT / file).exists() for file in files), (page, words)


def test_every_verb_has_a_section_on_the_page_of_commands() -> None:
    headings = re.findall(r"^## rlsync (\w+)$", (DOCS / "command_line.md").read_text(), re.MULTILINE)
    assert headings == list(VERBS)


# -------------------------------------------------------------------------------------------- links

LINK = re.compile(r"\]\(([^)\s]+)\)")


def slugs(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and MyST make them."""
    text = FENCED.sub("", page.read_text())
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, DOCS / "llms.txt"], ids=name_of)
def test_every_link_within_the_repository_leads_somewhere(page: Path) -> None:
    for link in LINK.findall(page.read_text()):
        if link.startswith(("http://", "https://")):
            continue
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        assert target.exists(), f"{name_of(page)} links to {link}"
        assert not anchor or anchor in slugs(target), f"{name_of(page)} links to {link}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_test_that_a_page_names_is_there(page: Path) -> None:
    for file, test in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", page.read_text()):
        if "NAME" not in file:
            assert (ROOT / file).exists(), f"{name_of(page)} names {file}"
            assert f"def {test}" in (ROOT / file).read_text(), f"{name_of(page)} names {file}::{test}"


REPORTS = ROOT / "docs" / "upstream"


@pytest.mark.processes
@pytest.mark.seconds
@pytest.mark.thorough
@pytest.mark.parametrize("program", sorted(REPORTS.glob("*.py")), ids=lambda path: path.stem)
def test_the_programs_of_reports_print_what_the_page_says(program: Path) -> None:
    page = (REPORTS / "index.md").read_text()
    (said,) = re.findall(rf"literalinclude}} {program.name}\n```\n\n```text\n(.*?)```", page, re.DOTALL)
    command = [sys.executable, "-W", "ignore", str(program)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=ENDS_WITHIN_S, check=True)
    printed = [line.rstrip() for line in ran.stdout.splitlines() if "[torchrl]" not in line]
    assert printed == said.splitlines()


def test_the_map_for_machines_lists_every_page() -> None:
    listed = set(LINK.findall((DOCS / "llms.txt").read_text()))
    pages = {str(page.relative_to(DOCS)) for page in PAGES if page.is_relative_to(DOCS)}
    pages = {page for page in pages if not page.startswith("decisions/")} | {"decisions/index.md"}
    assert pages - {"index.md"} == {link for link in listed if not link.startswith("http")}


# ---------------------------------------------------------------------------- what pages must agree with


@pytest.mark.parametrize(("file", "module"), [("api.md", rlsync), ("api_impala.md", impala)])
def test_every_public_name_stands_in_the_reference_once(file: str, module: object) -> None:
    shown = re.findall(r"^\.\. auto\w+:: ([\w.]+)$", (DOCS / file).read_text(), re.MULTILINE)
    names = [name.removeprefix(f"{module.__name__}.") for name in shown]
    public = [name for name in module.__all__ if name != "__version__"]
    assert sorted(name for name in names if name in public) == sorted(public)


def test_the_supported_versions_are_those_of_the_package() -> None:
    page = (DOCS / "compatibility.md").read_text()
    needs = {need.name: str(need.specifier) for need in map(Requirement, requires("rlsync") or [])}
    for name in ("torchrl", "tensordict", "torch", "gymnasium", "hydra-core"):
        (stated,) = re.findall(rf"^\| {name} \| `([^`]+)` \|", page, re.MULTILINE)
        assert set(stated.replace(" ", "").split(",")) == set(needs[name].split(",")), name


def test_the_table_of_all_recipes_is_that_of_the_kept_evaluations() -> None:
    assert (DOCS / "results" / "index.md").read_text() == runpy.run_path(str(DOCS / "results.py"))["page"]()


@pytest.mark.usefixtures("fork_workers")
def test_the_picture_of_explain_shows_what_explain_prints_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(DOCS)  # as Python does for a script
    printed = runpy.run_path(str(DOCS / "pictures.py"))["explained"]()
    shown = "".join(ElementTree.parse(DOCS / "pictures" / "explain.svg").getroot().itertext())
    assert "".join(printed.split()) in "".join(shown.split())


def test_the_gallery_has_twelve_small_pictures_that_their_commands_make(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(DOCS)
    script = runpy.run_path(str(DOCS / "pictures.py"))
    shown = list(script["gallery"]())
    page = (DOCS / "gallery.md").read_text()
    assert len(shown) == 12 == page.count("](pictures/") == page.count("\n## ") == page.count("```sh")
    for each in shown:
        assert each.picture in script["DRAWN"]
        assert (DOCS / "pictures" / each.picture).stat().st_size < 100_000, each.picture


@pytest.mark.slow
@pytest.mark.thorough
def test_a_picture_of_the_gallery_shows_what_its_command_prints_now(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(DOCS)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    script = runpy.run_path(str(DOCS / "pictures.py"))
    script["draw_of_gallery"](tmp_path / "check.svg")
    texts = []
    for file in (tmp_path / "check.svg", DOCS / "pictures" / "check.svg"):
        texts.append("".join(ElementTree.parse(file).getroot().itertext()))
    assert "nothing is wrong with this config" in texts[0].replace("\N{NO-BREAK SPACE}", " ")
    assert texts[0] == texts[1]


# ------------------------------------------------------------------------------------------ claims


def test_what_the_page_on_reliability_promises_has_tests_that_exist() -> None:
    claims = yaml.safe_load((DOCS / "claims.yaml").read_text())
    _, _, rest = (DOCS / "reliability.md").read_text().partition("<!-- table of claims -->\n")
    rows = rest.partition("<!-- end of table of claims -->")[0].splitlines()[2:]
    promises = [claim["promise"] for claim in claims]
    assert {row.split(" | ")[0].removeprefix("| ") for row in rows if row} <= set(promises)
    for claim in claims:
        assert claim.get("tests") or claim.get("scripts"), claim["promise"]
        for named in [*claim.get("tests", ()), *claim.get("scripts", ())]:
            path, _, test = named.partition("::")
            file = ROOT / path.split()[0]
            assert file.exists(), named
            assert not test or f"def {test.partition('[')[0]}(" in file.read_text(), named


def test_the_table_of_claims_is_written_only_if_all_of_them_were_run_in_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = runpy.run_path(str(DOCS / "claims.py"))
    main, page = script["main"], tmp_path / "page.md"
    before = f"{script['BEGIN']}| what is proven no longer |\n{script['END']}\n"
    monkeypatch.setitem(main.__globals__, "PAGE", page)
    monkeypatch.setitem(main.__globals__, "proven", lambda chosen, options: {chosen[0]: 1} if chosen else {})
    for arguments in (["no promise has this"], ["Weights arrive"], ["--", "-k", "typo"], ["--", "--lf"]):
        page.write_text(before)
        assert main(arguments) == int(arguments != ["Weights arrive"])
        assert page.read_text() == before
    assert main(["--", "-n", "4"]) == 1, "all but the first promise are not proven"
    rows = page.read_text().splitlines()
    assert len(rows) == 5, "of these, one has a promise"
    assert "no longer" not in page.read_text()
