"""The list of allowed operators is what its tool writes, and lacks what a hostile graph would call."""

import hashlib

import operator_table
import operators
import pytest
import torch

from aotexport_runtime.allowed.operators import allowed_aten_operators, operator_sets

WRITTEN_WITH = "2.13"
RELEASED = {"aotexport.aten/1": "a30c988434e5e259117ac70b7170ebe39c455e6845f47bda898e3c81c60daca8"}

DANGEROUS = {
    "reads files": ["from_file.default"],
    "takes storage from anywhere": ["set_.source_Storage", "set_.source_Storage_storage_offset"],
    "checks no bounds": ["_reshape_alias.default", "_reshape_alias_copy.default", "_index_put_impl_.default"],
    "builds sparse tensors unchecked": [
        *("_sparse_coo_tensor_unsafe.default", "_sparse_compressed_tensor_unsafe.default", "sparse_coo_tensor.indices"),
        *("_sparse_csr_tensor_unsafe.default", "to_sparse.default", "_to_sparse.default", "sparse_resize_.default"),
    ],
    "trusts packed buffers": [
        *("_cudnn_rnn.default", "_cudnn_rnn_flatten_weight.default", "_convert_weight_to_int4pack.default"),
        *("_weight_int4pack_mm.default", "_mkldnn_reshape.default", "mkldnn_rnn_layer.default"),
        *("_make_per_tensor_quantized_tensor.default", "fbgemm_pack_gemm_matrix_fp16.default"),
    ],
    "has no memory behind it": ["_efficientzerotensor.default", "_nested_view_from_buffer.default"],
    "changes the process": [
        *("record_stream.default", "_cufft_clear_plan_cache.default", "_cufft_set_plan_cache_max_size.default"),
        *("pin_memory.default", "_pin_memory.default"),
    ],
    "drives autograd": ["_backward.default", "retain_grad.default", "_fw_primal.default", "_make_dual.default"],
    "is a test": ["_test_warn_in_autograd.default", "_foobar.default"],
}


written_with = pytest.mark.skipif(
    not torch.__version__.startswith(f"{WRITTEN_WITH}."), reason=f"the list is that of torch {WRITTEN_WITH}"
)


@written_with
def test_list_is_what_its_tool_writes():
    assert operators.LIST.read_text(encoding="ascii") == operators.text_of(operator_sets(), "aotexport.aten/2")


def test_operator_set_of_a_release_is_as_released():
    rows = "\n".join(operator_sets()["aotexport.aten/1"].values())
    assert hashlib.sha256(rows.encode()).hexdigest() == RELEASED["aotexport.aten/1"], "make the next set; see the tool"


@pytest.mark.parametrize("reason", DANGEROUS)
def test_list_lacks_operators_of_every_dangerous_kind(reason):
    assert [name for name in DANGEROUS[reason] if name in allowed_aten_operators()] == []


@written_with
def test_no_listed_operator_takes_or_gives_storages_streams_or_quantizers():
    foreign = ("Storage", "Stream", "Quantizer", "QScheme")
    operators_ = [name.partition(".")[::2] for name in sorted(allowed_aten_operators())]
    schemas = [str(getattr(getattr(torch.ops.aten, base), overload)._schema) for base, overload in operators_]
    assert len(schemas) > 2000
    assert [schema for schema in schemas if any(type_ in schema for type_ in foreign)] == []


@written_with
def test_table_of_operators_has_the_random_ones_of_torch():
    rows = operator_table.table()["sets"]["aotexport.aten/1"]
    names = operator_sets()["aotexport.aten/1"]

    assert [row.get("random", False) for row in rows] == list(map(operator_table._is_random, names))
