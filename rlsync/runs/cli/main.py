"""The ``rlsync`` command: finds the verb and hands over."""

from __future__ import annotations

import argparse
import ctypes
import importlib
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from io import TextIOWrapper
from pathlib import Path

from rlsync import ConfigError, RlsyncError, __version__
from rlsync.runs.life.output import EXIT_INTERRUPTED, EXIT_USAGE, Unread, exit_status, output_read
from rlsync.seams import told_of_a_user_without_a_name, user_input

#: verb -> what it does, in one line; the verb's module has the same name and a ``main(arguments)``.
VERBS = {
    "train": "train a recipe: rlsync train [key=value ...]",
    "explain": "print what a sync map moves: rlsync explain [key=value ... | file.py:function]",
    "check": "list all that is wrong with a config, or what its run will do: rlsync check [key=value ...]",
    "doctor": "examine this machine, and whether a trainer's weights arrive: rlsync doctor",
    "status": "tell how a training's workers are, or how it ended: rlsync status RUN",
    "eval": "play episodes with the weights of a checkpoint: rlsync eval RUN",
    "rerun": "make a run again from its schedule, and compare: rlsync rerun RUN",
    "frame": "tell which version acted in one frame, on what, and how: rlsync frame RUN NUMBER",
    "compare": "find the first version and leaf in which two runs differ: rlsync compare RUN RUN",
    "export": "write a policy for other programs: rlsync export RUN policy.onnx",
    "timeline": "draw who made which rollout with which version: rlsync timeline RUN",
    "plot": "draw return, lag, staleness and publishes of runs: rlsync plot RUN [RUN ...]",
    "report": "write one page of runs, to send or to keep: rlsync report RUN [RUN ...] -o FILE.html",
    "ls": "list the shipped recipes and configs: rlsync ls [GROUP]",
    "cp": "copy a shipped config out, to edit it: rlsync cp GROUP/NAME [FOLDER]",
}


#: Verbs of an earlier rlsync, and what does their work.
GONE = {
    "plan": "give rlsync check the same words: it prints what the run will do, if nothing is wrong",
    "bench": "rlsync doctor says what a publish costs here; benchmarks/publish.py measures all of it",
}


def usage() -> str:
    verbs = "\n".join(f"  {verb:<9} {line}" for verb, line in VERBS.items())
    return (
        "rlsync: checked, versioned weight synchronisation for TorchRL\n\n"
        f"usage: rlsync VERB [arguments]\n\n{verbs}\n\n"
        "rlsync VERB --help says more. rlsync --version prints the version."
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb with these arguments, by default this process's, and return the exit status.

    A process that ran it for ``--json`` prints nothing more on its standard output, also when it exits.
    """
    if "_ARGCOMPLETE" in os.environ:  # the shell asks what can follow
        from rlsync.runs.cli.completion import complete

        complete()
    words = sys.argv[1:]
    if arguments is not None:
        words = list(arguments)
    _open_streams()
    try:
        with output_read():
            status = _run(words)
    except Unread as error:
        return exit_status(error)  # nothing is printed any more
    except RlsyncError as error:
        print(error, file=sys.stderr)
        status = exit_status(error)
    except KeyboardInterrupt:
        status = EXIT_INTERRUPTED
    if arguments is None and asks_json(words):
        _silence_stdout()
    return status


def asks_json(words: Sequence[str]) -> bool:
    """Whether a command line has ``--json``, which argparse lets people shorten."""
    return any(len(word) > 2 and "--json".startswith(word) for word in words)


#: The documents that verbs have printed; None: nobody waits for them.
_documents: ContextVar[list[str] | None] = ContextVar("documents", default=None)


def print_document(text: str) -> None:
    """Print what ``--json`` asks for: alone on the standard output, whatever else is printed meanwhile."""
    waiting = _documents.get()
    if waiting is None:
        print(text)
    else:
        waiting.append(text)


@contextmanager
def _document_alone() -> Iterator[None]:
    """Inside, all that is printed goes to stderr; afterwards the document is printed.

    Also what C prints, and processes that are started.
    """
    documents: list[str] = []
    token = _documents.set(documents)
    stdout = sys.stdout
    stdout.flush()
    descriptor = os.dup(1)
    _silence_stdout()
    try:
        yield
    finally:
        stdout.flush()  # of those that have kept it
        ctypes.CDLL(None).fflush(None)  # C's own buffer
        os.dup2(descriptor, 1)
        os.close(descriptor)
        sys.stdout = stdout
        _documents.reset(token)
    for text in documents:
        print(text, flush=True)


def _silence_stdout() -> None:
    """Let what is printed from here on go to stderr."""
    os.dup2(2, 1)
    sys.stdout = sys.stderr


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(usage())
        if words:
            return 0
        return EXIT_USAGE
    for word in words:
        if plain := re.match("-?[\u2013\u2014\u2212]+-?", word):
            bare = word[plain.end() :]
            cure = f"write --{bare}"
            if "=" in bare:
                cure += f", or {bare} if it is a key"
            raise ConfigError(
                f"{word!r} begins with the dash of a text editor", "the command line", cure
            )
    if words[0] == "--version":
        print(f"rlsync {__version__}")
        return 0
    verb, *arguments = words
    if verb in GONE:
        raise ConfigError(f"there is no verb {verb!r} any more", f"rlsync {verb}", GONE[verb])
    user_input.check_choice("verb", verb, VERBS, "rlsync VERB")
    around: AbstractContextManager[None] = nullcontext()
    if asks_json(arguments):
        around = _document_alone()
    with around, told_of_a_user_without_a_name():
        if verb == "train" and will_start_workers(arguments):
            from rlsync import Forkserver

            # It loads what workers need on another core, while this process loads what a learner needs.
            Forkserver()
        return int(importlib.import_module(f"rlsync.runs.cli.{verb}").main(arguments))


def will_start_workers(words: Sequence[str]) -> bool:
    """Whether a command line of ``rlsync train`` seems to be one that workers are forked for.

    If not, and in vain, nothing is lost but time: the fork server begins later, or ends with this process. So
    it looks at the form of the words alone; which keys and values there are takes imports to know.
    """
    in_other_processes = ("hydra/launcher=", "cluster=", "recipe.agents=", "restarts=")
    other_ways = ("-", *in_other_processes, "collector.num_workers=0")

    for word in words:
        is_override = "=" in word or word.startswith("~")
        if not is_override or word.startswith(other_ways):
            return False
    return True


def parser_of(
    verb: str, about: str, examples: str, usage: str | None = None
) -> argparse.ArgumentParser:
    """A verb with a usage of its own takes overrides, too, so its options cannot be abbreviated.

    Arguments of the type ``Path`` become absolute here: an environment may change the working directory.
    """
    parser = argparse.ArgumentParser(
        prog=f"rlsync {verb}",
        usage=usage,
        description=about,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=usage is None,
    )
    parser.register("type", Path, lambda word: Path(word).absolute())
    return parser


def _open_streams() -> None:
    """Open the standard streams that were closed, and let both print any text.

    So no file of a run gets their descriptors.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)
    nowhere = Path(os.devnull)
    sys.stdin = sys.stdin or nowhere.open()
    sys.stdout = sys.stdout or nowhere.open("w")
    sys.stderr = sys.stderr or nowhere.open("w")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a locale may lack a letter that is printed
            stream.reconfigure(errors="backslashreplace")
