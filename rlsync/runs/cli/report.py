"""``rlsync report``: one page of one or several runs, in one file that needs no network."""

from __future__ import annotations

import base64
import shlex
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO, StringIO
from pathlib import Path
from types import ModuleType
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from omegaconf import OmegaConf

from rlsync import ConfigError, RlsyncError, __version__
from rlsync.runs.cli.main import parser_of
from rlsync.runs.cli.over_seeds import BOOTSTRAPS, OverSeeds, groups_of
from rlsync.runs.cli.pictures import labels, panels_for
from rlsync.runs.config.composing import written
from rlsync.runs.evaluation.process import Evaluated
from rlsync.runs.life.result import RunResult
from rlsync.runs.life.resume import Change, changes
from rlsync.runs.life.run_folder import RecordedRun, RunFolder
from rlsync.runs.life.state import at, ended
from rlsync.runs.recipes.run_files import BEST_VIDEO, REPORT, RESOLVED, agents_in
from rlsync.runs.recipes.settings import Config
from rlsync.seams import first_line, schedule, whole_file

_EXAMPLES = """examples:
  rlsync report runs/2026-11-20/18-00-00-000000
  rlsync report runs/seed0 runs/seed1 runs/seed2 -o ppo.html
  rlsync report --watch runs/2026-11-20/18-00-00-000000    the live page

One file, which a browser opens without a network: what was trained and how it ended, curves, lag, staleness,
publishes, who acted with which version, evaluations with the film of the best, the keys that differ from the
defaults, versions, and the command that makes the run again. A run may still be running.

exit status: 0 written, 2 not a run folder, nothing to draw, a wrong file, or no matplotlib
"""

#: Evaluations that are listed, the newest ones; the curve has all.
_LISTED = 20
#: Seconds of a run's end of which the timeline is drawn.
_TIMELINE_S = 10.0
_REFRESH_S = 5


@dataclass(frozen=True, slots=True)
class Described:
    """A run as the page shows it."""

    name: str
    result: RunResult
    about: str  # recipe, environment and seed
    at: str  # when it ended; empty if it has not
    error: str
    film: str  # the best version's, in base64; empty: there is none
    command: str
    facts: dict[str, Any]  # versions and machine, as its schedule has them
    changed: list[Change]
    timeline: str  # a picture of the end of its newest life, in base64; empty: it has no schedule

    @property
    def evaluations(self) -> tuple[Evaluated, ...]:
        return self.result.evaluations[-_LISTED:]


def main(arguments: list[str]) -> int:
    about = "Write one page of one run, or of several to compare."
    parser = parser_of("report", about, _EXAMPLES)
    parser.add_argument(
        "run", type=Path, nargs="+", help="a run's folder, as rlsync train prints it"
    )
    out_help = f"default: {REPORT} in the first run"
    parser.add_argument("--out", "-o", type=Path, metavar="FILE.html", help=out_help)
    watch = "serve the page to browsers of this machine, made anew every few seconds, until Ctrl-C"
    parser.add_argument("--watch", action="store_true", help=watch)
    options = parser.parse_args(arguments)
    paths: list[Path] = []
    for run in options.run:
        paths += agents_in(run).values() or [run]
    if options.watch:
        page(labels(paths))  # what is wrong with it is told here
        with served(labels(paths)) as server:
            print(f"serving   {address_of(server)}", flush=True)
            server.serve_forever()
        return 0
    out = options.out or options.run[0] / REPORT
    whole_file.check_folder(out)
    if out.suffix not in (".html", ".htm"):
        raise ConfigError(f"no page {out.suffix!r}", str(out), "end it in .html")
    text = page(labels(paths))
    # Letters beyond ASCII as references: some programs, such as Python's email, drop what the page says of them.
    content = text.encode("ascii", "xmlcharrefreplace")
    whole_file.write_whole(out, lambda beside: beside.write_bytes(content))
    print(f"written   {out}")
    return 0


def served(runs: dict[str, Path]) -> ThreadingHTTPServer:
    """A server for browsers of this machine alone. It has one page, which it makes at each request."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            # A page of somebody else's may have a name that leads here.
            if (
                self.path != "/"
                or self.headers.get("Host") != address_of(server)[len("http://") : -1]
            ):
                self.send_error(404)
                return
            try:
                content = page(runs, refresh_s=_REFRESH_S).encode()
            except RlsyncError as error:
                self.send_error(503, first_line(error))
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    return server


def address_of(server: ThreadingHTTPServer) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}/"


def page(runs: dict[str, Path], refresh_s: int | None = None) -> str:
    """The page of these runs, by the names that it calls them; a browser asks for it again every so often."""
    panels = panels_for("rlsync report", Path(f"{REPORT}.svg"))
    folders = {name: RunFolder(path) for name, path in runs.items()}
    described = {}
    for name, folder in folders.items():
        described[name] = _described(name, folder, _newest_life(folder.path), panels)
    (wide, narrow), notes = panels.draw_each(folders, (2, 1))
    template = Path(__file__).with_name("page.html.jinja").read_text()
    filled = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    filled.filters["number"] = _number
    return filled.from_string(template).render(
        title=folders[next(iter(runs))].describe() if len(runs) == 1 else f"{len(runs)} runs",
        refresh_s=refresh_s,
        runs=list(described.values()),
        groups=list(_scored(folders, described)),
        wide=Markup(_svg(wide)),  # matplotlib has escaped what it writes
        narrow=Markup(_svg(narrow)),
        notes=notes,
        bootstraps=BOOTSTRAPS,
        timeline_s=_TIMELINE_S,
        version=__version__,
        written_at=at(time.time()),
    )


def _newest_life(run: Path) -> schedule.Life | None:
    """As its schedule has it; None without one."""
    try:
        return RecordedRun(run).lives[-1]
    except (ConfigError, OSError):
        return None


def _described(
    name: str, folder: RunFolder, life: schedule.Life | None, panels: ModuleType
) -> Described:
    path = folder.path
    config = written(path / RESOLVED)
    end = ended(path)
    film = path / BEST_VIDEO
    return Described(
        name=name,
        result=RunResult.of(path),
        about=folder.describe(),
        at="" if end is None else end.at,
        error="" if end is None else end.error,
        film=_base64(film.read_bytes()) if film.is_file() else "",
        command=_command(path),
        facts={} if life is None else _facts(life),
        changed=changes(_defaults(config), config),
        timeline="" if life is None else _timeline(panels, life),
    )


def _defaults(config: Config) -> Config:
    """What a run with this recipe has where nothing is set."""
    return Config(recipe=type(config.recipe)(), env=type(config.env)())


def _command(run: Path) -> str:
    """What makes a run again: bit by bit, and from the words that started it."""
    lines = [f"rlsync rerun {shlex.quote(str(run))}"]
    words = run / ".hydra" / "overrides.yaml"
    if words.is_file():
        overrides = [str(word) for word in OmegaConf.load(words)]
        lines.append(shlex.join(["rlsync", "train", *overrides]))
    return "\n".join(lines)


def _facts(life: schedule.Life) -> dict[str, Any]:
    """Versions and machine of a life."""
    facts = life.facts.items()
    return {name: value for name, value in facts if isinstance(value, str | int | float)}


def _scored(
    folders: dict[str, RunFolder], described: dict[str, Described]
) -> Iterator[tuple[str, str, OverSeeds]]:
    """What runs that differ in their seeds alone have come to together: who, in which number, and how far."""
    for group, members in groups_of(folders).items():
        if len(members) == 1:
            continue
        best = []
        last = []
        for name in members:
            result = described[name].result
            if result.best_return is not None:
                best.append(result.best_return)
            if result.last_return is not None:
                last.append(result.last_return)
        if len(best) == len(members):
            yield group, "best evaluations", OverSeeds.of(best)
        elif len(last) == len(members):
            yield group, "returns of the newest episodes", OverSeeds.of(last)


def _timeline(panels: ModuleType, life: schedule.Life) -> str:
    """The end of a life as a picture in base64."""
    last_ms = max((rollout.ms for rollout in life.rollouts), default=0.0)
    end = life.between(last_ms - 1e3 * _TIMELINE_S, float("inf"))
    buffer = BytesIO()
    panels.lanes({"": end}).savefig(buffer, format="png", dpi=120, transparent=True)
    return _base64(buffer.getvalue())


def _svg(figure: Any) -> str:
    text = StringIO()
    figure.savefig(text, format="svg", transparent=True)
    _, tag, rest = text.getvalue().partition("<svg")
    return tag + rest


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _number(value: float | None, digits: int) -> str:
    if value is None:
        return "–"
    return f"{value:,.{digits}f}"
