"""Values on the wire: Python values <-> one control part and tensor buffers.

`Codec` is the door.  `FunctionTable` names functions and finds them again, under a
`Policy`.  `describe_exception` and `rebuild_exception` carry exceptions across a call.
"""

from asyncrpc.serde.exceptions import describe_exception, rebuild_exception
from asyncrpc.serde.functions import FunctionTable, describe_callable, expose
from asyncrpc.serde.hooks import Hooks
from asyncrpc.serde.policy import Limits, Policy
from asyncrpc.serde.staging import HostStager, Stager
from asyncrpc.serde.values import Codec, Encoded

__all__ = [
    "Codec",
    "Encoded",
    "FunctionTable",
    "Hooks",
    "HostStager",
    "Limits",
    "Policy",
    "Stager",
    "describe_callable",
    "describe_exception",
    "expose",
    "rebuild_exception",
]
