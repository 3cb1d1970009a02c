"""The bundle format: records, versions and their JSON form. Imports msgspec and nothing of torch.

`schemas/README.md` is the normative prose; `schemas/v1/*.schema.json` is generated from these records.
"""

from aotexport_runtime.schema.codec import decode_record, encode_record
from aotexport_runtime.schema.graph import Graph, GraphInput, Node, SourceLine
from aotexport_runtime.schema.manifest import FileEntry, Manifest, ProgramEntry, Requirements, StateTensor
from aotexport_runtime.schema.program import Program
from aotexport_runtime.schema.versions import CALLING_CONVENTION, FORMAT_VERSION

__all__ = [
    "CALLING_CONVENTION",
    "FORMAT_VERSION",
    "FileEntry",
    "Graph",
    "GraphInput",
    "Manifest",
    "Node",
    "Program",
    "ProgramEntry",
    "Requirements",
    "SourceLine",
    "StateTensor",
    "decode_record",
    "encode_record",
]
