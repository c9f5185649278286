"""Simulation: replay traces through the core with other sizes, policies and flows."""

from kvstore.simulation.costs import Costs
from kvstore.simulation.curve import LRUCurve, sizes_between
from kvstore.simulation.fleet import ROUTERS, Fleet, FleetOutcome, replay_fleet
from kvstore.simulation.optimum import Optimum, optimum
from kvstore.simulation.picture import check_picture, draw
from kvstore.simulation.replay import Outcome, Setup, replay
from kvstore.simulation.sample import sample
from kvstore.simulation.trace import Trace, read_trace

__all__ = [
    "ROUTERS",
    "Costs",
    "Fleet",
    "FleetOutcome",
    "LRUCurve",
    "Optimum",
    "Outcome",
    "Setup",
    "Trace",
    "check_picture",
    "draw",
    "optimum",
    "read_trace",
    "replay",
    "replay_fleet",
    "sample",
    "sizes_between",
]
