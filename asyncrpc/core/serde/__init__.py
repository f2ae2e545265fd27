"""Values on the wire: Python values <-> one control part and tensor buffers.

`Codec` is the entry point.  `FunctionTable` names functions and finds them again, under
a `Policy`.  `describe_exception` and `rebuild_exception` carry exceptions across
calls.
"""

from asyncrpc.core.serde.bounds import weight_at_most
from asyncrpc.core.serde.compression import (
    Compression,
    PackedMessage,
    compression_for_answer,
    compression_named,
    memory_of,
    unreadable,
)
from asyncrpc.core.serde.decoding import (
    DevicePlacement,
    Staged,
    copies_buffers,
    is_staged,
    is_unprepared,
    references_in,
    stage,
)
from asyncrpc.core.serde.encoded import Copy, Encoded, HostStager, Stager, is_packed
from asyncrpc.core.serde.exceptions import (
    describe_exception,
    rebuild_exception,
    text_of,
    undescribed,
    words_of,
)
from asyncrpc.core.serde.functions import FunctionTable, describe_callable, expose
from asyncrpc.core.serde.hooks import Hooks
from asyncrpc.core.serde.policy import Limits, Policy
from asyncrpc.core.serde.quick import UNREAD
from asyncrpc.core.serde.shared import FindStorage, share
from asyncrpc.core.serde.values import Codec

__all__ = [
    "UNREAD",
    "Codec",
    "Compression",
    "Copy",
    "DevicePlacement",
    "Encoded",
    "FindStorage",
    "FunctionTable",
    "Hooks",
    "HostStager",
    "Limits",
    "PackedMessage",
    "Policy",
    "Staged",
    "Stager",
    "compression_for_answer",
    "compression_named",
    "copies_buffers",
    "describe_callable",
    "describe_exception",
    "expose",
    "is_packed",
    "is_staged",
    "is_unprepared",
    "memory_of",
    "rebuild_exception",
    "references_in",
    "share",
    "stage",
    "text_of",
    "undescribed",
    "unreadable",
    "weight_at_most",
    "words_of",
]
