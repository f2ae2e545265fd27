"""Every machine of the package whose transitions are data.

`spec.Machine` says what an entry has; a new machine gets one, and so a walk through all
of its table, a drawing, and mutants.
"""

from __future__ import annotations

from typing import Final

from tests.property.machines.of_barriers import SERIES
from tests.property.machines.of_collectives import COLLECTIVE
from tests.property.machines.of_doors import ASGI_CONNECTION, LIFESPAN
from tests.property.machines.of_elastic_groups import ELASTIC
from tests.property.machines.of_links import DIAL, LINK, PEER, RECONNECT, RESUME
from tests.property.machines.of_meeting_points import ARRIVAL, KEEPING
from tests.property.machines.of_messages import OUTGOING
from tests.property.machines.of_model_hosts import ATTACHMENT, OCCUPANCY
from tests.property.machines.of_payloads import LANES, REGION
from tests.property.machines.of_preemption import PREEMPTION
from tests.property.machines.of_references import HOLDING
from tests.property.machines.of_replicas import REPLICA, WEIGHTS
from tests.property.machines.of_sequences import SEQUENCE
from tests.property.machines.of_stages import MICRO_BATCH
from tests.property.machines.of_workers import WORKER
from tests.property.machines.spec import Machine

CATALOG: Final[tuple[Machine, ...]] = (
    *(WORKER, PREEMPTION, ARRIVAL, KEEPING, PEER, DIAL, LINK, RECONNECT, RESUME, LANES),
    *(OUTGOING, REGION, SERIES, COLLECTIVE, ELASTIC, HOLDING, MICRO_BATCH, SEQUENCE),
    *(ASGI_CONNECTION, LIFESPAN, REPLICA, WEIGHTS, ATTACHMENT, OCCUPANCY),
)
