"""Which run folders are this user's own, and what is read of all others: nothing that can run code.

A run leaves a random number in its folder. The user's state folder keeps that number with the folder's inode.
So a folder that was moved is still known, and a copy of it is not.
"""

from __future__ import annotations

import os
import pickle
import re
import uuid
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from rlsync import ConfigError, RlsyncWarning
from rlsync.runs.recipes.run_files import STARTED
from rlsync.seams import first_line, printable, warn, whole_file

if TYPE_CHECKING:  # imports torch: rlsync plot needs none of it
    from rlsync.runs.recipes.settings import Config

FLAG = "--trust"  #: the flag that lets code run that a folder holds or names

HELP = "load a checkpoint that cannot be checked, and code that another user's run holds or names"

#: Keys that can name code, or where to send things, and those that ``rlsync eval`` uses.
OF_ENV = ("env.id", "env.make", "env.kwargs", "env.wrappers")
CODE = (*OF_ENV, "cluster.address", "logger.kwargs")

_DATA = (".json", ".memmap")  #: files of a checkpoint that hold numbers and text alone
_PICKLES = (".pickle", ".pkl")
#: torch.load reads a file that begins otherwise by an older way, which runs code even with weights_only.
_ZIP = b"PK\x03\x04"
#: What a pickle raises that is damaged, or names a class.
_DAMAGED = (
    pickle.UnpicklingError,
    EOFError,
    AttributeError,
    ImportError,
    LookupError,
    TypeError,
    ValueError,
)


def _state_folder() -> Path:
    home = Path(os.environ.get("XDG_STATE_HOME", ""))
    if not home.is_absolute():
        home = Path.home() / ".local" / "state"
    return home / "rlsync" / "runs"


def claim(run: Path, trusted: bool) -> None:
    """Record that this user starts a run in a folder; not if somebody else's files may lie in it already."""
    if is_mine(run):
        return
    if not trusted and any(path.is_dir() and path.name != ".hydra" for path in run.iterdir()):
        return
    number = uuid.uuid4().hex
    try:
        _state_folder().mkdir(mode=0o700, parents=True, exist_ok=True)
        (_state_folder() / number).write_text(f"{run.stat().st_ino} {run.resolve()}\n")
        whole_file.write_whole(run / STARTED, lambda beside: beside.write_text(number))
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home
        problem = f"this run cannot be recorded as yours: {first_line(error)}"
        cure = f"set XDG_STATE_HOME to a folder that you can write; else eval and resume may ask for {FLAG}"
        warn(RlsyncWarning(problem, str(run), cure))


def is_mine(run: Path) -> bool:
    try:
        number = (run / STARTED).read_text()
        at = run.stat()
        if at.st_uid != os.getuid() or not re.fullmatch("[0-9a-f]{32}", number):
            return False
        return (_state_folder() / number).read_text().partition(" ")[0] == str(at.st_ino)
    except (OSError, RuntimeError, ValueError):
        return False


def refuse(what: str, where: object) -> NoReturn:
    """Refuse what could run code and comes from the folder of a run that this user did not start."""
    cure = f"look at it, and add {FLAG} (in Python trust=True) if you trust who wrote it"
    raise ConfigError(
        f"{what}, and you did not start the run that this comes from", str(where), cure
    )


def check_checkpoint(checkpoint: Path, trusted: bool) -> None:
    """Refuse a foreign checkpoint with a file that could run code when TorchRL or tensordict load it."""
    if trusted or is_mine(checkpoint.parent):
        return
    if not checkpoint.is_dir():
        refuse("the checkpoint is an archive, whose files are not looked at", checkpoint)
    for file in sorted(checkpoint.rglob("*")):
        _check_file(file)


def check_file(file: Path, run: Path, trusted: bool) -> None:
    if file.exists() and not trusted and not is_mine(run):
        _check_file(file)


def _check_file(file: Path) -> None:
    if file.is_symlink():
        refuse("a link leads out of the files that are looked at", file)
    if file.is_dir() or file.suffix in _DATA:
        return
    with file.open("rb") as opened:
        if file.suffix == ".pt" and opened.read(len(_ZIP)) == _ZIP:  # read with weights_only
            return
        if file.suffix not in _PICKLES:
            refuse("a file is of a kind that rlsync does not write", file)
        try:
            _PlainData(opened).load()
        except _DAMAGED as error:
            refuse(f"a pickle holds more than plain data: {first_line(error)}", file)


class _PlainData(pickle.Unpickler):
    """Loads numbers, text and their containers, which is what TorchRL's ``prefetch.pkl`` has; no class."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def check_code(config: Config, keys: Collection[str], file: Path, trusted: bool) -> None:
    """Refuse a foreign config in which one of these keys names code."""
    if trusted or is_mine(file.parent):
        return
    values = {
        "env.id": config.env.id,
        "env.make": config.env.make,
        "env.kwargs": config.env.kwargs,
        "env.wrappers": config.env.wrappers or None,
        "cluster.address": config.cluster.address,
        "logger.kwargs": config.logger.kwargs or None,
    }
    if ":" not in config.env.id:
        del values["env.id"]
    # A module's name has a dot or a colon.
    plain = re.compile(r"[\w-]*|-?[\d.e+-]+")
    if all(map(plain.fullmatch, map(str, config.env.kwargs.values()))):
        del values["env.kwargs"]
    for key in CODE:
        value = values.get(key)
        if key in keys and value is not None:
            refuse(f"{key} is {value}", file)


def config_in(file: Path) -> DictConfig:
    """The config that a run wrote: printable values without interpolations, which could read this process."""
    try:
        config = OmegaConf.load(file)
        texts = list(_texts(OmegaConf.to_container(config, resolve=False)))
        if not isinstance(config, DictConfig):
            raise ValueError("it is no mapping")
    except (OmegaConfBaseException, YAMLError, OSError, ValueError, RecursionError) as error:
        raise unreadable(first_line(error), file) from error
    for text in texts:
        if "${" in text or text != printable(text):
            problem = f"a run's configuration has values alone, and this one has {text!r}"
            raise ConfigError(problem, str(file), "write the value there")
    return config


def unreadable(why: str, file: Path) -> ConfigError:
    """The error of a run's config that cannot be read."""
    problem = f"cannot read the run's configuration: {why}"
    return ConfigError(problem, str(file), "use the rlsync that wrote it, and its recipe")


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, below in value.items():
            yield from (*_texts(key), *_texts(below))
    elif isinstance(value, list):
        for below in value:
            yield from _texts(below)
