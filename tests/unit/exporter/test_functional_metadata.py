"""Metadata of AOTAutograd that no record has is refused."""

import copy

import pytest
import torch

import aotexport
from aotexport.encode.functional import Unsupported, refuse_unsupported
from aotexport.torch_internals.releases import release


@pytest.fixture(scope="module")
def metadata(tmp_path_factory):
    """Return what AOTAutograd tells of a small model."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("aotexport.encode.program.refuse_unsupported", found.append)
        path = tmp_path_factory.mktemp("bundle") / "bundle"
        aotexport.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),), programs=("train",), output=path, verify=False)
    return found[0]


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("tokens", {"effect": 0}, "effect tokens"),
        ("num_backward_tokens", 1, "effect tokens"),
        (release().asynchronous_inputs, [0], "asynchronous collective tensors"),
        ("indices_of_inputs_that_requires_grad_with_mutations_in_bw", [0], "mutation of an input in backward"),
        ("num_graphsafe_rng_states", 1, "functionalised random state"),
        ("is_rng_op_functionalized", True, "functionalised random state"),
        ("mutated_inp_stream_indices", [None, 0], "mutations on user streams"),
        ("keep_input_mutations", True, "mutations kept in the graph"),
    ],
)
def test_metadata_that_no_record_has_is_refused(metadata, field, value, reason):
    changed = copy.copy(metadata)
    changed.mutated_inp_stream_indices = [None]
    refuse_unsupported(changed)
    setattr(changed, field, value)
    with pytest.raises(Unsupported, match=f"^{reason}$"):
        refuse_unsupported(changed)
