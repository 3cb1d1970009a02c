"""Consistency of decoded records: rules that the types of the schema cannot express. No torch.

No record of a bundle is used before it has passed here, and nothing here runs code of the bundle. Each `check_*`
refuses a fault by `BundleInvalid`: it raises the first, or notes all where its `Place` collects them.
"""

from aotexport_runtime.validate.arguments import descendants, references
from aotexport_runtime.validate.graph import check_graph
from aotexport_runtime.validate.interface import check_forward_graph, check_functional_graph
from aotexport_runtime.validate.manifest import check_manifest, check_onnx
from aotexport_runtime.validate.program import check_program
from aotexport_runtime.validate.targets import (
    check_compiled,
    check_kernels,
    check_lowered,
    check_lowered_graph,
    check_target,
)
from aotexport_runtime.validate.vector import check_stored, check_vector

__all__ = [
    "check_compiled",
    "check_forward_graph",
    "check_functional_graph",
    "check_graph",
    "check_kernels",
    "check_lowered",
    "check_lowered_graph",
    "check_manifest",
    "check_onnx",
    "check_program",
    "check_stored",
    "check_target",
    "check_vector",
    "descendants",
    "references",
]
