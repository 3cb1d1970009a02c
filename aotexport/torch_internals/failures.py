"""The errors by which torch says that it cannot do something; other errors from torch are bugs."""

from __future__ import annotations

TORCH_ERRORS: tuple[type[Exception], ...] = (
    # `TORCH_CHECK` and all C++ errors without a Python class of their own: torch 2.13, torch/csrc/Exceptions.h. In
    # Python, classes derived from it: `DataDependentOutputException`, `DynamicOutputShapeException`,
    # `UnsupportedOperatorException` (torch/_subclasses/fake_tensor.py), `GuardOnDataDependentSymNode`,
    # `ConstraintViolationError` (torch/fx/experimental/symbolic_shapes.py), `TorchDynamoException`
    # (torch/_dynamo/exc.py), `InductorError`, `LoweringException` (torch/_inductor/exc.py), `OnnxExporterError`
    # (torch/onnx/errors.py), `LinAlgError`, `OutOfMemoryError` (torch/csrc/Exceptions.cpp), `NotImplementedError`.
    RuntimeError,
    # `TORCH_CHECK_INDEX`, `TORCH_CHECK_TYPE`, `TORCH_CHECK_VALUE`: torch/csrc/Exceptions.h.
    IndexError,
    TypeError,
    ValueError,
    # Assertions of torch's own Python about programs: torch/_functorch/_aot_autograd, torch/export, torch/fx.
    AssertionError,
)
