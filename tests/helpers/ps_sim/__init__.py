"""A parameter-server job in one thread: virtual time, a network that fails by seed, deaths at any message."""

from helpers.ps_sim.checks import check
from helpers.ps_sim.cluster import Cluster
from helpers.ps_sim.network import NetFaults
from helpers.ps_sim.scenario import Kill, Scale, Scenario, SimulationFailed

__all__ = ["Cluster", "Kill", "NetFaults", "Scale", "Scenario", "SimulationFailed", "check"]
