"""Backend for engines: the state pool and the verify/commit round over all KDA layers."""

from kda_backend.commit import commit_layers
from kda_backend.pool import LANES, MODES, REFERENCE_LANE, StatePool, lane_mode

__version__ = "0.1.0"

__all__ = ["LANES", "MODES", "REFERENCE_LANE", "StatePool", "commit_layers", "lane_mode"]
