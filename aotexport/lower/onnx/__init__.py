"""ONNX models of a bundle's programs; `aotexport/pipeline/onnx.py` adds them."""
