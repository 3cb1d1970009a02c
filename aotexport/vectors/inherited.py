"""Arguments of the calls that a loaded bundle has recorded, for a bundle that is made of it."""

from __future__ import annotations

import torch

from aotexport.eager.recorded_arguments import RecordedArguments, is_in_range
from aotexport.model.ancestry import loaded_in
from aotexport.model.call import ExampleCall
from aotexport_runtime.commands.recorded import read_vector
from aotexport_runtime.schema.manifest import Verification
from aotexport_runtime.schema.program import Program


def inherited_arguments(
    call: ExampleCall, program: Program, example: RecordedArguments, verification: Verification
) -> list[RecordedArguments] | None:
    """Return the arguments of the further calls that a loaded bundle has recorded of a program.

    Sizes that the model refused were found out at the first export, and its graph does not tell them.

    Args:
        call: the example call.
        program: the program.
        example: its example arguments.
        verification: in how many calls the new bundle is compared.

    Returns:
        The arguments; None: the call is of no loaded bundle, which has recorded this example for this program, and as
        many calls beside it.
    """
    found = [module for path, module in loaded_in(call) if not path]
    if not found or (found[0].bundle.manifest.verification or "standard") != verification:
        return None
    bundle = found[0].bundle
    recorded: dict[str, RecordedArguments] = {}
    for entry in bundle.manifest.testvectors:
        if entry.program == program.name:
            vector, stored = read_vector(bundle, entry)
            keys = stored.keys() - {f"v{index}" for index in range(len(vector.values))}
            recorded[entry.name] = RecordedArguments(
                entry.name, vector.inputs, {key: tensor for key, tensor in stored.items() if key in keys}
            )
    known = recorded.pop(example.name, None)
    if known is None or not _are_same(known, example) or _ranges(bundle.program(program.name)) != _ranges(program):
        return None
    return [arguments for arguments in recorded.values() if is_in_range(program, arguments)]


def _ranges(program: Program) -> list[tuple[int | None, int | None]]:
    return [(size.min, size.max) for size in program.dimensions]


def _are_same(one: RecordedArguments, other: RecordedArguments) -> bool:
    tensors = one.stored
    return (
        one.specs == other.specs
        and tensors.keys() == other.stored.keys()
        and all(torch.equal(tensor, tensors[key]) for key, tensor in other.stored.items())
    )
