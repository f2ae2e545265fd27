"""What is public around workers by its name, and is not for users to call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_RECORD: Final = "a record that the runtime makes; users read it"
_OF_PROXY: Final = "called by the connections that go through a proxy"

LEFT_OUT: Final[Mapping[str, str]] = {
    "CallStats": _RECORD,
    "Counters": _RECORD,
    "GroupCall": "made by PeerGroup.call",
    "GroupReply": _RECORD,
    "MemberChange": _RECORD,
    "MemberChanges": "made by Worker.members_changed",
    "MemberChanges.end": "called by the worker whose members they are",
    "MemberChanges.put": "called by the worker whose members they are",
    "RRefRecord": _RECORD,
    "multiprocessing.Processes": "made by multiprocessing.launch",
    "serving.WorkerStatus": _RECORD,
    "testing.Proxy.forget": _OF_PROXY,
    "testing.Proxy.pass_on": _OF_PROXY,
    "testing.Proxy.pieces": _OF_PROXY,
    "testing.Proxy.until_due": _OF_PROXY,
}
