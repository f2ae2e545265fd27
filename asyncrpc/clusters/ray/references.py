"""A reference to a value in Ray's object store that may also be sent by asyncrpc."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from asyncrpc.clusters.ray.bundles import is_pickling_for_ray, library


@dataclass(frozen=True, slots=True)
class StoredValue:
    """A value in Ray's object store; from `asyncrpc.ray.put`.

    If Ray sends it, as an argument or a result, it is counted: Ray frees the object
    when no process refers to it.  If asyncrpc sends it, Ray cannot count it: the object
    stays until the sending process ends.  Ray's own references must not be sent by
    asyncrpc: a received one does not know its owner, and `get` waits forever.

    Attributes:
        ref: Ray's reference, for Ray's functions.
    """

    ref: Any

    def __reduce__(self) -> Any:
        if is_pickling_for_ray():
            return StoredValue, (self.ref,)
        return _loaded, (library().cloudpickle.dumps(self.ref),)


def _loaded(pickled: bytes) -> StoredValue:
    return StoredValue(library().cloudpickle.loads(pickled))
