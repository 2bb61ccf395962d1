"""Backend for engines: the state pool, its slots and bytes, and the verify/commit round over all KDA layers."""

from kda_backend.commit import commit_layers
from kda_backend.lanes import LANES, MODES, REFERENCE_LANE, Target, conservative_lane, lane_mode
from kda_backend.plan import MemoryPlan, memory_plan
from kda_backend.pool import StatePool
from kda_backend.slots import PoolExhausted, SlotAllocator, SlotState

__version__ = "0.1.0"

__all__ = [
    "LANES",
    "MODES",
    "REFERENCE_LANE",
    "MemoryPlan",
    "PoolExhausted",
    "SlotAllocator",
    "SlotState",
    "StatePool",
    "Target",
    "commit_layers",
    "conservative_lane",
    "lane_mode",
    "memory_plan",
]
