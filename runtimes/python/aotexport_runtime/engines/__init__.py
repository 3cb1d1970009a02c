"""Engines: what serves the calls of a program. `select.py` chooses by rules.

forward/      the forward graph under eager autograd: the program's meaning, and the last that is tried
functional/   the joint or inference graph with its epilogues, by generated code
frozen.py     the inference graph by layers of oneDNN, or by the ONNX model, while the weights stay
cpu/, cuda/   the same graph as native code
onnx/         the ONNX model, by any runtime of such models, and ONNX Runtime
openvino/     OpenVINO, one of them
"""
