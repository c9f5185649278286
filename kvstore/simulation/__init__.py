"""What other sizes, policies and flows would have brought: traces replayed through the core."""

from kvstore.simulation.replay import Outcome, Setup, replay
from kvstore.simulation.trace import Trace, read_trace

__all__ = ["Outcome", "Setup", "Trace", "read_trace", "replay"]
