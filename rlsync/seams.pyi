"""The seams of rlsync by name, each from the module that defines it: the one list, which Python reads, too.

``as`` tells a type checker that a name may be taken.
"""
# isort: skip_file

from rlsync.core import (
    extensions as extensions,
    ledger as ledger,
    machine as machine,
    trace as trace,
    user_input as user_input,
    whole_file as whole_file,
)
from rlsync.core.errors import (
    causes as causes,
    first_line as first_line,
    printable as printable,
    warn as warn,
)
from rlsync.core.nameless import told_of_a_user_without_a_name as told_of_a_user_without_a_name
from rlsync.core.path import parse as parse
from rlsync.core.plan import POLICY as POLICY
from rlsync.core.trigger import Counters as Counters, Trigger as Trigger
from rlsync.tensors import device as device, sendable as sendable, target as target
from rlsync.tensors.digest import all_finite as all_finite, digest as digest
from rlsync.tensors.layout import dtype_named as dtype_named, Layout as Layout
from rlsync.tensors.leaves import Leaves as Leaves
from rlsync.transport import bell as bell, shared_file as shared_file
from rlsync.transport.board.format import (
    BoardWatch as BoardWatch,
    DATA_AT as DATA_AT,
    EVALUATOR as EVALUATOR,
)
from rlsync.transport.board.reader import BoardHandle as BoardHandle, BoardReader as BoardReader
from rlsync.transport.board.writer import BoardWriter as BoardWriter
from rlsync.transport.contract import (
    ReaderStatus as ReaderStatus,
    TellsAtOnce as TellsAtOnce,
    Transport as Transport,
)
from rlsync.transport.ray.learner import RayTransport as RayTransport
from rlsync.transport.ray.receiver import NodeReceiver as NodeReceiver
from rlsync.sync import (
    acts as acts,
    families as families,
    processes as processes,
    starting as starting,
)
from rlsync.sync.adopter import Adopt as Adopt, Adopter as Adopter, Destination as Destination
from rlsync.sync.sample import Shadow as Shadow
from rlsync.sync.trained import UNCHANGED_PUBLISHES as UNCHANGED_PUBLISHES
from rlsync.sync.workers_publisher import WorkersPublisher as WorkersPublisher
from rlsync.torchrl_plugin.collectors.board import BoardEndpoint as BoardEndpoint
from rlsync.torchrl_plugin.collectors.choose import endpoint_of as endpoint_of
from rlsync.torchrl_plugin.compat import in_place_of as in_place_of, trainers as trainers
from rlsync.torchrl_plugin.compat.collectors import around_arrivals as around_arrivals
from rlsync.torchrl_plugin.compat.stamps import STAMP as STAMP
from rlsync.torchrl_plugin.ending import last_checkpoint as last_checkpoint
from rlsync.torchrl_plugin.examine import verdicts as verdicts
from rlsync.torchrl_plugin.examine.examine import examine as examine
from rlsync.torchrl_plugin.examine.machine import machine_findings as machine_findings
from rlsync.torchrl_plugin.hooks import ages as ages, misuse as misuse
from rlsync.record import planned as planned, schedule as schedule
from rlsync.record.record_schedule import stop as stop
