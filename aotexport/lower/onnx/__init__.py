"""ONNX models of a bundle's programs; `bundle.py` adds them."""
