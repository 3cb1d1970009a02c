"""Classes of `torch.nn` whose modules a bundle names by class and attributes. No torch at import.

These and its parameters and buffers determine the behaviour of a module, and none runs code of others.
"""

CONTAINERS = frozenset({"Sequential", "ModuleList", "ModuleDict"})
"""Classes that hold modules."""

_DIMENSIONAL = (
    *("Conv", "ConvTranspose", "BatchNorm", "InstanceNorm", "Dropout", "MaxPool", "AvgPool"),
    *("AdaptiveAvgPool", "AdaptiveMaxPool"),
)

KNOWN = CONTAINERS | {
    *(f"{name}{rank}d" for name in _DIMENSIONAL for rank in (1, 2, 3)),
    *("AlphaDropout", "Bilinear", "CELU", "Dropout", "ELU", "Embedding", "FeatureAlphaDropout", "Flatten", "GELU"),
    *("GLU", "GroupNorm", "Hardshrink", "Hardsigmoid", "Hardswish", "Hardtanh", "Identity", "LayerNorm", "LeakyReLU"),
    *("Linear", "LogSigmoid", "LogSoftmax", "Mish", "PReLU", "PixelShuffle", "RMSNorm", "ReLU", "ReLU6", "SELU"),
    *("SiLU", "Sigmoid", "Softmax", "Softplus", "Softshrink", "Softsign", "Tanh", "Tanhshrink", "Threshold"),
    *("Unflatten", "Upsample"),
}
"""All classes, by name."""

_UNDERSCORED = ("_reversed_padding_repeated_twice",)


def is_own_attribute(name: str) -> bool:
    """Return whether the class of a module reads an attribute, and not every module has it."""
    return name in _UNDERSCORED or not (name.startswith("_") or name in ("training", "forward"))
