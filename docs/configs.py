"""Writes the default values and the comments in ``configs/`` from the dataclasses of the settings.

``make configs`` runs it. A field's comment stands above it in Python, in lines that begin with ``#:``.
Header, defaults list, order of the keys and line breaks of a YAML file are written by hand. So is what a file
says differently on purpose; two tables list it. To add a key, write ``key: null`` where it belongs in the
YAML file, and run this.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from rlsync.runs.config.own_hydra import KEY, PARTS
from rlsync.runs.config.shipped import config_dir
from rlsync.runs.recipes import registry, settings

#: Keys of which a file says something else than the dataclass.
COMMENTS_BY_HAND: dict[str, set[str]] = {
    "cluster/none.yaml": {"kind"},
    "cluster/ray.yaml": {"kind"},
    "env/atari.yaml": {
        "clip_reward",
        "frame_stack",
        "kwargs",
        "make",
        "max_episode_steps",
        "wrappers",
    },
    "env/gymnasium.yaml": {"id"},
    "env/rendered.yaml": {"num_envs"},
    "logger/csv.yaml": {"kind", "kwargs"},
    "logger/none.yaml": {"kind", "kwargs"},
    "logger/tensorboard.yaml": {"kind", "kwargs"},
    "logger/wandb.yaml": {"kind", "kwargs"},
    "recipe/crossq.yaml": {"recipe.pace.ratio", "recipe.target_return"},
    "recipe/dqn.yaml": {"recipe.anneal_lr", "recipe.hidden", "recipe.pace.ratio"},
    "recipe/dreamer_v3.yaml": {"recipe.buffer_frames", "recipe.gamma", "recipe.lr"},
    "recipe/impala.yaml": {
        "recipe.evaluation.episodes",
        "recipe.evaluation.every_frames",
        "recipe.gamma",
        "recipe.target_episodes",
        "recipe.target_return",
    },
    "recipe/ppo.yaml": {
        "recipe.anneal_lr",
        "recipe.batch_size",
        "recipe.lr",
        "recipe.target_episodes",
        "recipe.target_return",
        "recipe.total_frames",
    },
    "recipe/sac.yaml": {"recipe.pace.ratio", "recipe.target_return"},
    "recipe/td3.yaml": {
        "recipe.anneal_lr",
        "recipe.lr",
        "recipe.pace.ratio",
        "recipe.target_return",
    },
    "sync/dreamer_v1.yaml": {"map"},
    "sync/dreamer_v3.yaml": {"map"},
    "sync/value_greedy.yaml": {"when.every", "when.unit"},
    "train.yaml": {"evaluation.device", "learner.device"},
}

#: What a file is for: the keys whose value is not the default of its dataclass.
VALUES_BY_HAND: dict[str, set[str]] = {
    "cluster/ray.yaml": {"kind"},
    "collector/nodes.yaml": {"lag"},
    "env/doorkey.yaml": {"id", "wrappers"},
    "env/gymnasium.yaml": {"id"},
    "env/halfcheetah.yaml": {"id"},
    "env/hopper.yaml": {"id"},
    "env/lunarlander.yaml": {"id"},
    "env/mountaincar.yaml": {"id"},
    "env/pendulum.yaml": {"id"},
    "env/walker2d.yaml": {"id"},
    "logger/none.yaml": {"kind"},
    "logger/tensorboard.yaml": {"kind"},
    "logger/wandb.yaml": {"kind", "kwargs"},
    "sync/actor.yaml": {"map"},
    "sync/dreamer_v1.yaml": {"map"},
    "sync/dreamer_v3.yaml": {"map"},
    "sync/value_greedy.yaml": {"map", "when.every", "when.unit"},
}

_WIDTH = 120
_KEY = re.compile(r"(?P<indent> *)(?P<key>\w+):(?P<value>.*)$")


class NotInStep(Exception):
    """A file has a key that its dataclass lacks, or lacks one."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What a dataclass says of a key; ``value`` is no default where the key is a section."""

    comment: str
    value: Any
    is_section: bool


@cache
def comments_of(cls: type) -> dict[str, str]:
    """The comments of a dataclass's own fields, as they stand above them."""
    source = textwrap.dedent(inspect.getsource(cls))
    lines, found = source.splitlines(), {}
    (node,) = ast.parse(source).body
    assert isinstance(node, ast.ClassDef)
    for field in node.body:
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            above: list[str] = []
            for line in reversed(lines[: field.lineno - 1]):
                if not line.strip().startswith("#:"):
                    break
                above.insert(0, line.strip().removeprefix("#:").removeprefix(" "))
            if above:
                found[field.target.id] = "\n".join(above)
    return found


def settings_of(section: Any, prefix: str) -> Iterator[tuple[str, Setting]]:
    """Every key of a section of settings."""
    for spec in fields(section):
        if spec.name == KEY:  # where a recipe of a user's lies
            continue
        comments = (
            comments_of(cls).get(spec.name) for cls in type(section).__mro__ if is_dataclass(cls)
        )
        comment = next((text for text in comments if text), "")
        value = getattr(section, spec.name)
        yield prefix + spec.name, Setting(comment, value, is_dataclass(value))
        if is_dataclass(value):
            yield from settings_of(value, f"{prefix}{spec.name}.")


def known_in(file: Path) -> dict[str, Setting]:
    """The settings of the dataclass that a file's defaults list names; none where it names another file."""
    for entry in (yaml.safe_load(file.read_text()) or {}).get("defaults", []):
        if isinstance(entry, str) and entry.startswith("/schema/"):
            name, _, package = entry.removeprefix("/schema/").partition("@")
            if name.startswith("recipe/"):
                made: Any = registry.recipe_named(name.removeprefix("recipe/")).settings()
            else:
                made = settings.Config() if name == "config" else PARTS[name]()
            known = dict(settings_of(made, "" if package in ("", "_here_") else f"{package}."))
            in_groups = tuple(
                f"{group.name}." for group in config_dir().iterdir() if group.is_dir()
            )
            if name == "config":  # the sections of groups stand in files of their own
                known = {key: s for key, s in known.items() if not f"{key}.".startswith(in_groups)}
            return known
    return {}


def written(file: Path) -> str:
    """What a file has to say.

    Raises:
        NotInStep: its keys are not those of its dataclass.
    """
    known, name = known_in(file), name_of(file)
    lines: list[str] = []
    sections: list[tuple[int, str]] = []
    seen: set[str] = set()
    comment_from = 0  # the first of the comment lines above the present one
    for line in file.read_text().splitlines():
        match = _KEY.match(line)
        if match is None:
            lines.append(line)
            if not line.strip().startswith("#"):
                comment_from = len(lines)
            continue
        indent = len(match["indent"])
        sections = [section for section in sections if section[0] < indent]
        key = ".".join([*(name for _, name in sections), match["key"]])
        if not match["value"].strip():
            sections.append((indent, match["key"]))
        if key in known:
            seen.add(key)
            if key not in COMMENTS_BY_HAND.get(name, ()) and not _shares(lines, comment_from):
                lines[comment_from:] = _comment(
                    lines[comment_from:], known[key].comment, match["indent"]
                )
            if key not in VALUES_BY_HAND.get(name, ()) and not known[key].is_section:
                line = _with_value(match, plain(known[key].value))
        elif _is_foreign(key, known):
            raise NotInStep(f"{name} has {key}, and its dataclass does not")
        lines.append(line)
        comment_from = len(lines)
    if missing := known.keys() - seen:
        raise NotInStep(
            f"{name} lacks {', '.join(sorted(missing))}: write 'key: null' where it belongs"
        )
    return "\n".join(lines) + "\n"


def _shares(lines: list[str], comment_from: int) -> bool:
    """Whether a key follows another one without a gap: then the comment above them is that of both."""
    before = lines[comment_from - 1].strip() if comment_from == len(lines) and lines else ""
    return bool(before) and not before.endswith(":")


def _is_foreign(key: str, known: dict[str, Setting]) -> bool:
    """Whether a key stands among those of the dataclass and is none of them, nor an entry of one's value."""
    if not known or key.partition(".")[0] in ("defaults", "hydra"):
        return False
    parts = key.split(".")
    above = [known.get(".".join(parts[:depth])) for depth in range(1, len(parts))]
    if any(setting is not None and not setting.is_section for setting in above):
        return False
    of_a_section = all(name.startswith("recipe.") for name in known)
    return key.startswith("recipe.") or not of_a_section


def _comment(above: list[str], comment: str, indent: str) -> list[str]:
    """The comment lines above a key; as they are where they say the same."""
    there = [line.strip().removeprefix("#").removeprefix(" ") for line in above]
    if not comment or " ".join(" ".join(there).split()) == " ".join(comment.split()):
        return above
    wrapped: list[str] = []
    for paragraph in paragraphs(comment):
        width = _WIDTH - len(indent) - 2
        wrapped += [paragraph] if paragraph.startswith("  ") else textwrap.wrap(paragraph, width)
    return [f"{indent}# {line}".rstrip() for line in wrapped]


def paragraphs(comment: str) -> list[str]:
    """Its paragraphs, each in one line; indented lines are code and stay as they are."""
    found: list[str] = []
    for line in comment.splitlines():
        if (
            found
            and line.strip()
            and not line.startswith("  ")
            and not found[-1].startswith("  ")
            and found[-1]
        ):
            found[-1] += " " + line.strip()
        else:
            found.append(line)
    return found


def plain(value: Any) -> Any:
    """A value without dataclasses, such as the routes of a sync map."""
    if isinstance(value, list):
        return [plain(entry) for entry in value]
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def _with_value(match: re.Match[str], value: Any) -> str:
    line = match[0]
    if value == yaml.safe_load(line)[match["key"]] and type(value) is type(
        yaml.safe_load(line)[match["key"]]
    ):
        return line
    text = (
        yaml.safe_dump(value, default_flow_style=True, width=_WIDTH).removesuffix("...\n").strip()
    )
    return f"{match['indent']}{match['key']}: {text}"


def name_of(file: Path) -> str:
    """A file's name as the tables have it."""
    return file.relative_to(config_dir()).as_posix()


def files() -> list[Path]:
    """All config files, those of tuned settings excepted."""
    return sorted(file for file in config_dir().rglob("*.yaml") if file.parent.name != "tuned")


def main() -> int:
    """Write the files that are not current, and name them."""
    from config_schema import texts  # which takes comments from here

    wanted = {file: written(file) for file in files()} | texts()
    for file, text in wanted.items():
        if not file.is_file() or text != file.read_text():
            sys.stdout.write(f"{file.name}\n")
            file.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
