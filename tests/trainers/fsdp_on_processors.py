"""Runs a script as `accelerate launch` does, with accelerate's FSDP, which it has for GPUs alone, on processors.

Run as `accelerate launch ... fsdp_on_processors.py SCRIPT ...`. accelerate asks only which kind of ranks there are;
what follows is its own code, and torch's.
"""

import runpy
import sys
from pathlib import Path

from accelerate import PartialState
from accelerate.utils import DistributedType

PartialState(cpu=True)._shared_state["distributed_type"] = DistributedType.MULTI_GPU
sys.argv = sys.argv[1:]
sys.path.insert(0, str(Path(sys.argv[0]).parent))
runpy.run_path(sys.argv[0], run_name="__main__")
