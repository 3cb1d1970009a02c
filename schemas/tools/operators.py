"""Write the allow-list of `aten` operators: `python schemas/tools/operators.py aotexport.aten/2`.

The argument is the operator set that gets what no set has yet.

Takes the operators that the installed torch dispatches, and leaves out what no captured graph needs or what a hostile
one could abuse: operators that touch files, memory without bounds checks, autograd's or the process's own state, and
every storage but plain strided tensors. Names with a leading underscore are torch's internals; those that captured
graphs hold are named one by one. The list is data; this is how it came to be, and `docs/security.md` says what it is
worth.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import torch

from aotexport_runtime.allowed.operators import SET_HEAD, read_sets

LIST = Path(__file__).parents[2] / "runtimes/python/aotexport_runtime/allowed/aten.txt"

HEADER = """\
# Operators of aten that a bundle may call, by operator set, with their signatures; by schemas/tools/operators.py.
# A set that a release of the runtime has never changes: what is new makes the next set.
"""

EXCLUDED = re.compile(
    r"""^(
    # files, pinned memory, streams, autograd's own state, dtypes as values
      from_file | record_stream | .*pin_memory | is_pinned | retain_grad | retains_grad | is_leaf
    | output_nr | requires_grad | can_cast | promote_types | result_type
    # storage that is not plain and strided: indices inside of it are not checked
    | .*sparse.* | .*coalesce.* | (ccol_|col_|crow_|row_)?indices(_copy)? | values(_copy)? | smm | sspaddmm | hspmm
    | dense_dim | to_dense.* | embedding_backward | .*mkldnn.* | .*nested.* | to_padded_tensor | .*vulkan.* | .*mps.*
    | quantize.* | dequantize.* | .*quantized.* | fbgemm.* | q_.* | qscheme | int_repr | .*qparams.*
    # functional forms of changes of storage, which no capture makes
    | resize | resize_as | set
    # kernels that other operators choose by themselves, and steps of them
    | miopen.* | cudnn_convolution.* | cudnn_affine.* | cudnn_is_acceptable | convolution.*_overrideable | thnn_conv2d
    | slow_conv.* | conv_depthwise3d | fused_moving.*
    | batch_norm_(backward_elemt|backward_reduce|elemt|gather.*|stats|update_stats)
    # offsets that kernels do not check
    | segment_reduce
    # composites of others, which give none of their checks
    | gather_backward
    )$""",
    re.VERBOSE,
)
"""Base names without a leading underscore that are left out."""

INTERNAL = re.compile(
    r"""^(
      __(and|iand|ilshift|ior|irshift|ixor|lshift|or|rshift|xor)__
    # checks of values
    | _assert_(async|scalar|tensor_metadata) | _functional_assert_(async|scalar) | _make_dep_token
    | _functional_sym_constrain_range(_for_size)? | _is_(all|any)_true | _linalg_check_errors | _local_scalar_dense
    # what composite operators and autograd's formulas are made of
    | _adaptive_avg_pool[23]d(_backward)? | _chunk_cat | _lu_with_info
    | _batch_norm_(no_update|with_update|with_update_functional)
    | _native_batch_norm_legit(_functional|_no_training)? | _cdist_(backward|forward) | _euclidean_dist
    | _conj(_copy|_physical)? | _neg_view(_copy)? | _ctc_loss(_backward)? | _dirichlet_grad | _sample_dirichlet
    | _standard_gamma(_grad)? | _embedding_bag(_backward|_dense_backward|_forward_only|_per_sample_weights_backward)?
    | _fft_(c2c|c2r|r2c) | _foreach_\w+ | _fused_rms_norm(_backward)? | _grouped_mm | _int_mm
    | _histogramdd_(bin_edges|from_bin_cts|from_bin_tensors) | _linalg_(det|eigh|eigvals|slogdet|solve_ex|svd)
    | _log_softmax(_backward_data)? | _softmax(_backward_data)? | _safe_softmax | _pdist_(backward|forward)
    | _pack_padded_sequence(_backward)? | _pad_packed_sequence | _prelu_kernel(_backward)?
    | _scaled_dot_product_attention_math
    | _scaled_dot_product_(cudnn|efficient|flash)_attention(_backward)?
    | _scaled_dot_product_flash_attention_for_cpu(_backward)?
    | _scaled_dot_product_fused_attention_overrideable(_backward)?
    | _thnn_fused_gru_cell(_backward)? | _thnn_fused_lstm_cell(_backward_impl)? | _to_copy | _trilinear | _unique2?
    | _unsafe_(index|index_put|masked_index|masked_index_put_accumulate|view)
    | _upsample_(bicubic2d|bilinear2d|lanczos2d)_aa(_backward)? | _upsample_nearest_exact[123]d(_backward)?
    | _weight_norm(_interface|_interface_backward)?
    )$""",
    re.VERBOSE,
)
"""Base names with a leading underscore that captured graphs hold."""

ON_NUMBERS = frozenset(("_assert_scalar", "sym_constrain_range", "sym_constrain_range_for_size"))
"""Operators without tensors that captured graphs hold."""

ELEMENT_WISE = frozenset(f"{base}_backward" for base in ("gelu", "sigmoid", "silu", "tanh", "threshold"))
"""Backward operators whose form that writes into a given tensor the runtime uses."""

FOREIGN = re.compile("Storage|Stream|Quantizer|QScheme|Dimname|Dict|__torch__")
"""Types that no argument of a bundle has."""


def allowed() -> list[str]:
    """Return the allowed operators as `base.overload`, sorted."""
    return sorted(filter(_is_allowed, dispatched()))


def dispatched() -> set[str]:
    """Return every operator that the installed torch dispatches, as `base.overload`."""
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    return {name.removeprefix("aten::") if "." in name else f"{name.removeprefix('aten::')}.default" for name in names}


def _is_allowed(name: str) -> bool:
    base, _, overload = name.partition(".")
    if (
        (overload == "grad_input" and base not in ELEMENT_WISE)
        or EXCLUDED.match(base)
        or (base.startswith("_") and not INTERNAL.match(base))
    ):
        return False
    operator = getattr(getattr(torch.ops.aten, base, None), overload, None)
    if operator is None:
        return False
    types = [str(argument.real_type) for argument in (*operator._schema.arguments, *operator._schema.returns)]
    on_tensors = base in ON_NUMBERS or any("Tensor" in type_ for type_ in types)
    return on_tensors and not any(FOREIGN.search(type_) for type_ in types)


def text_of(sets: dict[str, dict[str, str]], newest: str) -> str:
    """Return the text of the list: the sets that there are, and in set `newest` what none of them has."""
    known = {name for rows in sets.values() for name in rows}
    packets = {name: getattr(torch.ops.aten, name.partition(".")[0]) for name in allowed() if name not in known}
    added = {name: str(getattr(packet, name.partition(".")[2])._schema) for name, packet in packets.items()}
    written = {**sets, **({newest: {**sets.get(newest, {}), **added}} if added else {})}
    parts = ["\n".join([SET_HEAD + name, *rows.values()]) for name, rows in written.items()]
    return HEADER + "\n".join(parts) + "\n"


if __name__ == "__main__":
    current = read_sets(LIST.read_text(encoding="ascii"))
    LIST.write_text(text_of(current, sys.argv[1]), encoding="ascii")
