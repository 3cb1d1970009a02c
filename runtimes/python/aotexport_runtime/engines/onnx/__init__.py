"""The engine `onnx`: programs through ONNX Runtime, for inference. No torch, unless the caller passes its tensors."""
