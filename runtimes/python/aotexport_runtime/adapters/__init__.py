"""Adapters: LoRA on loaded bundles, in the files of peft."""

from aotexport_runtime.adapters.config import LoraConfig
from aotexport_runtime.adapters.files import load_adapter, save_adapter
from aotexport_runtime.adapters.lora import (
    add_lora,
    delete_adapter,
    disable_adapters,
    merge_adapter,
    report,
    set_adapter,
    unmerge_adapter,
    use_adapter,
)
from aotexport_runtime.adapters.targets import Report, Target

__all__ = [
    "LoraConfig",
    "Report",
    "Target",
    "add_lora",
    "delete_adapter",
    "disable_adapters",
    "load_adapter",
    "merge_adapter",
    "report",
    "save_adapter",
    "set_adapter",
    "unmerge_adapter",
    "use_adapter",
]
