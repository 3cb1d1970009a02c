"""The systems that are measured, one file each.

A system names what it writes ahead of time (`prepare`) and how a process gets a callable module from that (`load`);
everything that is measured is made of these two. A new system is a new file, and its line in `SYSTEMS`.
"""

from benchmarks.systems.bundle import AUTOGRAD, PORTABLE
from benchmarks.systems.eager import EAGER
from benchmarks.systems.interface import Prepared, System
from benchmarks.systems.torch_export import TORCH_EXPORT

SYSTEMS: dict[str, System] = {system.name: system for system in (EAGER, PORTABLE, AUTOGRAD, TORCH_EXPORT)}
"""Every system, by name, in the order of the tables."""

__all__ = ["SYSTEMS", "Prepared", "System"]
