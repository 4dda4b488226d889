"""The agents that a run may leave on a cluster: under which name, and for how long."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

from rlsync.core.whole_file import write_whole
from rlsync.recipes.run_files import CREW
from rlsync.recipes.settings import Config
from rlsync.workers.cluster.crew import Crew

_NAME = "crew"


def crew_of(config: Config) -> Crew | None:
    """The crew of a run. A resumed run has that of the run before it.

    A run that keeps its agents writes the name into its folder.

    Args:
        config: of the run.

    Returns:
        It; ``None`` for a run that keeps no agents and resumes none that did.
    """
    name = _name_in(config.resume)
    if not config.cluster.keep_agents:
        return None if name is None else Crew(name)
    name = name or uuid.uuid4().hex[:12]
    if config.run_dir is not None:
        text = json.dumps({_NAME: name})
        write_whole(Path(config.run_dir) / CREW, lambda beside: beside.write_text(text))
    return Crew(name, config.cluster.learner_timeout_s)


def _name_in(resume: str | None) -> str | None:
    """The name that the run before has written down; ``resume`` is its folder or its checkpoint."""
    if resume is None:
        return None
    files = [folder / CREW for folder in (Path(resume), Path(resume).parent)]
    file = next((file for file in files if file.is_file()), None)
    return None if file is None else str(json.loads(file.read_text())[_NAME])
