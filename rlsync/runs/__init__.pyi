"""What programs take of the runs, each from the module that defines it."""

from rlsync.runs.life.launch import train as train
from rlsync.runs.life.result import RunResult as RunResult
