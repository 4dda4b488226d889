"""A user id without a name is told in three lines where torch needs one, not by a KeyError of getpass."""

from __future__ import annotations

import pytest

from rlsync.core.errors import ConfigError
from rlsync.core.nameless import told_of_a_user_without_a_name
from tests.tools.programs import fresh_python
from tests.tools.running import in_three_lines

#: No environment names the user, nor does the host, and torch is as before 2.13.
NAMELESS = """
import getpass, os, pwd, sys
for name in ("LOGNAME", "USER", "LNAME", "USERNAME", "TORCHINDUCTOR_CACHE_DIR"):
    os.environ.pop(name, None)
def getpwuid(uid):
    raise KeyError(f"getpwuid(): uid not found: {uid}")
pwd.getpwuid = getpwuid
from importlib import util
name = "torch._inductor.runtime.cache_dir_utils"
(torch,) = util.find_spec("torch").submodule_search_locations
file = os.path.join(torch, "_inductor/runtime/cache_dir_utils.py")
spec = util.spec_from_file_location(name, file)
sys.modules[name] = before_2_13 = util.module_from_spec(spec)
spec.loader.exec_module(before_2_13)
before_2_13.default_cache_dir = lambda: "/tmp/torchinductor_" + getpass.getuser()
"""

LIBRARY = """
from rlsync.core.errors import ConfigError
try:
    import rlsync
    rlsync.SyncWeights
except ConfigError as error:
    print(error)
"""

COMMAND = """
from rlsync.runs.cli.main import main
sys.stderr = sys.stdout
print(main(["doctor"]))
"""


@pytest.mark.processes
@pytest.mark.seconds
@pytest.mark.parametrize("program", [LIBRARY, COMMAND])
def test_a_user_without_a_name_is_told_what_to_set(program: str) -> None:
    said = fresh_python("-c", NAMELESS + program).stdout
    assert "has no name, and torch before 2.13 needs one when it is imported\n  where  getpass" in said
    assert "\n  cure   set USER to any name" in said


@pytest.mark.parametrize(
    "error",
    [KeyError("getpwuid(): uid not found: 12345"), OSError("No username set in the environment")],
)
def test_what_getpass_raises_becomes_three_lines_with_the_cure(error: Exception) -> None:
    with pytest.raises(ConfigError, match="has no name") as raised, told_of_a_user_without_a_name():
        raise error
    assert in_three_lines(raised.value)


@pytest.mark.parametrize("error", [KeyError("policy"), FileNotFoundError("no such file")])
def test_other_errors_are_left_alone(error: Exception) -> None:
    with pytest.raises(type(error)), told_of_a_user_without_a_name():
        raise error
