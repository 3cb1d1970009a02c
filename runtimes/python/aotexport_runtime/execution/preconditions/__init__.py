"""What operators need beyond torch's own checks; these modules fill the table that `table.guarded` looks into."""

from aotexport_runtime.execution.preconditions import images, layers, mathematics

__all__ = ["images", "layers", "mathematics"]
