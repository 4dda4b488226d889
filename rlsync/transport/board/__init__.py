"""The WeightBoard: weights from one learner to the worker processes of one host."""

from rlsync.transport.board.format import BoardWatch
from rlsync.transport.board.reader import BoardHandle, BoardReader
from rlsync.transport.board.writer import BoardWriter

__all__ = ["BoardHandle", "BoardReader", "BoardWatch", "BoardWriter"]
