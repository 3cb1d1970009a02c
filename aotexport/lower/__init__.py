"""Programs in forms that are faster than the portable one, or run elsewhere, one package per target.

Captured functional graphs come in (of `onnx`: the programs of a bundle), files for `targets/` of the bundle go out.
"""
