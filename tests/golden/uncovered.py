"""Arms of the format's unions that no golden has, each with the reason. One that gains a golden leaves the table."""

_NO_SLICES = "graphs of torch slice by operators; slices of computed bounds will come with Python containers"
_NO_NESTING = "no operator of format 1.0 takes an array of arrays; fused attention will"
_NO_SHAPE_EXPRESSION = "a reader must know it; torch's shape environment writes the sizes of these models without it"

_USERS = "the compiler's own kernels take integers; kernels of users take what they like"
_NUMBERS = ("bf16", "fp16", "fp32", "fp64", "i1", "i16", "i8", "u16", "u32", "u64", "u8")
_NO_LIBRARIES = "no two compilers give one library byte by byte; tests/conformance and tests/hostile have such records"
_VERIFIED = "goldens are of an exporter that did not say it; no reader does anything with it"
_ONE_EXPORT = "a golden is of one export; tests/conformance/test_derive.py has bundles of bundles"
_DEVICES = "goldens are of other machines; a reader treats all classes alike"

UNCOVERED: dict[str, str] = {
    "SliceArgument.start: string": _NO_SLICES,
    "SliceArgument.stop: string": _NO_SLICES,
    "SliceArgument.step: string": _NO_SLICES,
    "Argument[]: array": _NO_NESTING,
    "Argument[][]: Element": _NO_NESTING,
    "Argument[][]: array": _NO_NESTING,
    "FunctionalGraph.deterministic: null": "the exporter always records it",
    "InputMutation.storage: true": "torch 2.13 refuses to take `set_` on an input out of a graph",
    "IntermediateAlias.requires_grad: false": "torch keeps bases of intermediates only for views that require grad",
    'ScalarMeta.type: "int"': "integers of a captured graph are sizes",
    "ViewStep.item: int": "10.15: no view has several results",
    'SizeOperator: "not"': _NO_SHAPE_EXPRESSION,
    'SizeOperator: "where"': _NO_SHAPE_EXPRESSION,
    'Program.autocast: "float16"': "it is held as the other dtype is",
    "Kernel.source: null": "the exporter always keeps sources",
    "KernelCandidate.cooperative: true": "the compiler makes such kernels of very large reductions only",
    **{f"KernelConstant.value: {type_}": _USERS for type_ in ("bool", "float", "null", "string")},
    **{f'NumberType: "{type_}"': _USERS for type_ in _NUMBERS},
    **{f'Manifest.verification: "{how}"': _VERIFIED for how in ("fast", "full", "standard")},
    **{f'DeviceClass: "{name}"': _DEVICES for name in ("hpu", "mps", "mtia", "npu", "xla", "xpu")},
    **{f"Ancestor.child: {arm}": _ONE_EXPORT for arm in ("int", "null")},
    **{f"CompiledHalf.indexes: {value}": _NO_LIBRARIES for value in ("false", "true")},
    **{f"CompiledProgram.backward: {arm}": _NO_LIBRARIES for arm in ("CompiledHalf", "null")},
    **{f"CompiledProgram.partition: {arm}": _NO_LIBRARIES for arm in ("null", "string")},
}
