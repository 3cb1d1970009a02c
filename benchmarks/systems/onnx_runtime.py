"""ONNX Runtime and OpenVINO on the model that `torch.onnx.export` writes, for inference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.models import Model, by_position
from benchmarks.systems.interface import Mode, Prepared, System

_FILE = "model.onnx"


def _prepare(model: Model, directory: Path) -> Prepared:
    import torch

    directory.mkdir(exist_ok=True)
    args, kwargs = by_position(model.inputs())
    sizes = model.sizes and model.sizes()
    options: dict[str, Any] = {"dynamo": True, "verbose": False, "dynamic_shapes": sizes}
    torch.onnx.export(model.module().eval(), args, str(directory / _FILE), kwargs=kwargs, **options)
    return Prepared()


def _load(model: Model, directory: Path, mode: Mode) -> Callable[..., Any]:
    import onnxruntime
    import torch

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(str(directory / _FILE), options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    return _called(names, lambda feeds: session.run(None, feeds))


def _load_openvino(model: Model, directory: Path, mode: Mode) -> Callable[..., Any]:
    import openvino
    import torch

    properties = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "INFERENCE_PRECISION_HINT": "f32"}
    compiled = openvino.Core().compile_model(directory / _FILE, "CPU", properties)
    request = compiled.create_infer_request()
    names = [port.get_any_name() for port in compiled.inputs]
    return _called(names, lambda feeds: request.infer(feeds, share_inputs=True).to_tuple())


def _called(names: list[str], infer: Callable[[Mapping[str, Any]], Sequence[Any]]) -> Callable[..., Any]:
    import torch

    def run(*args: torch.Tensor, **kwargs: torch.Tensor) -> Any:
        given: Mapping[str, torch.Tensor] = kwargs or dict(zip(names, args, strict=True))
        results = infer({name: value.numpy() for name, value in given.items() if name in names})
        tensors = [torch.from_numpy(result) for result in results]
        return tensors if len(tensors) > 1 else tensors[0]

    return run


ONNX_RUNTIME = System(
    "ONNX Runtime",
    "ONNX Runtime on the file of torch.onnx.export",
    artefact="onnx",
    prepare=_prepare,
    load=_load,
    modes=frozenset({"infer"}),
)
OPENVINO_PEER = System(
    "OpenVINO",
    "OpenVINO on the file of torch.onnx.export, in float32",
    artefact="onnx",
    prepare=_prepare,
    load=_load_openvino,
    modes=frozenset({"infer"}),
)
