"""Codes of what a reader refuses: part of the format, so that they stay; `schemas/codes.md` lists them.

A code says which rule a bundle breaks, in one word for programs; the message of the error says it for people.
"""

from __future__ import annotations

CODES: dict[str, str] = {
    "bundle-invalid": "what no other code says",
    "bundle-missing": "no directory with a `bundle.json`",
    "json-malformed": "no JSON in UTF-8; a number beyond a double; half of a surrogate pair",
    "json-key-twice": "an object that has the same key twice",
    "json-record": "an unknown field, a missing one, or a value that its type does not have",
    "json-limit": "a file beyond the limits of 2.7",
    "version-malformed": "a version that is not `MAJOR.MINOR`",
    "version-newer": "a bundle that needs a newer reader",
    "version-older": "a format older than the oldest that the reader knows",
    "version-contradicts": "a `min_reader` that is newer than `format`, or of another major version",
    "convention-unknown": "a calling convention that the reader does not implement",
    "extension-unknown": "an extension that the reader does not know and may not skip",
    "file-missing": "a listed file that is not there",
    "file-unlisted": (
        "a file that a record names and the manifest does not list; an ONNX model that is not at the top of the bundle"
    ),
    "file-outside": "a file that leads out of the bundle",
    "file-differs": "a file of another size or digest than listed, or with a hole in place of data",
    "file-path": "a path that is not relative and plain (1.3), or has more than 1000 characters",
    "name-twice": (
        "two of one name: files, programs, recorded calls of a program, ONNX models of a program, names of an "
        "ONNX model, submodules, attributes, state tensors (`tied` included), symbols, parameters, rebinds, "
        "changed containers; two mutations, rises, tangents or checks of one tensor; values of a graph, saved or "
        "observed values, keys of a tree; a state tensor that is named as a part of another's name before a dot, "
        "or as a submodule"
    ),
    "name-malformed": (
        "a name of a program, target, recorded call, graph file or library that is not 1 to 64 letters, digits "
        "and `_.-` beginning with a letter or digit; a parameter, field, namespace or part of a module's name "
        "that is no identifier (of Python, and no keyword); a method that is none, or begins with `__`; a class that "
        "is not `module:qualified.name`; a name of state or of a submodule with an empty part; an extension not "
        "named as 3.4 says"
    ),
    "text-malformed": (
        "a name, path or reason of more than 1000 characters, or with one that is not printable; a digest that is "
        "not 64 lower-case hexadecimal digits"
    ),
    "index-range": (
        "an index or a count out of its range, where no other code names it: `Vector.calls` is at most 100; "
        "`Ancestor.child` is before its record"
    ),
    "reference-missing": (
        "a program, state tensor, subgraph, kernel, container, extension or value of a library that is not there; "
        "a `variant_of` that is no earlier program without one"
    ),
    "value-undefined": "a reference to a value that is not defined before it",
    "symbol-undefined": (
        "a size with a symbol that its program does not have, and that no metadata introduce (5.4); a grid over what "
        "is no integer argument of its kernel"
    ),
    "size-malformed": (
        "an expression with operands of another number or type than section 5 says, with 0 written as a divisor, "
        "of an integer to a power that is not written as 0 to 64, whose value is no integer or may have more than "
        "1024 bits, or of more than 500 terms"
    ),
    "number-limit": "an integer of more than 64 bits, in a size or dimension of a magnitude beyond 63",
    "tensor-layout": (
        "sizes and strides that are not as many; more than 64 axes; a negative size, stride or offset; sizes, "
        "strides, or elements of a stored tensor beyond 63 bits; a `whole` tensor that is not contiguous, or has "
        "an offset"
    ),
    "tensor-stored": (
        "a stored tensor that is missing, or of another dtype or shape than its record says; an element outside "
        "of its span"
    ),
    "state-differs": "a state input of another dtype, shape or structure than its entry in the manifest",
    "structure-malformed": (
        "a tree with other numbers of keys, fields and items, or with what its place does not allow; a tensor "
        "subclass of another shape or number of parts than its structure; an integer that requires grad; an array "
        "that is a tensor in another place, or has a dtype that NumPy lacks"
    ),
    "constant-expected": (
        "a reference, size or subgraph where a constant must stand: in a tree, among arguments of a view step"
    ),
    "program-malformed": (
        "a bundle without programs; a program of another name than its place; a dimension that is read from the "
        "state, or with factor 0; `outputs` or `of_inputs` that are not as many as the program's outputs or inputs; "
        "gradients without a partition; a tangent without a layout, with a `stride` or `memory_format` of another "
        "rank, of an alias, or of another dtype or number of axes than its value; a size where an index names a "
        "tensor, or an alias where one names a base; two parameters for further arguments of one kind; an argument "
        "that no parameter has; a change that its container does not take"
    ),
    "graph-interface": (
        "a graph whose inputs or outputs are not as many as sections 9, 10 and 15 say; an input of another dtype "
        "or shape than the program's, or the tangent's; a constant as new value, alias or base"
    ),
    "partition-malformed": (
        "a saved value that is not in the graph, or needs a tangent; an `unchecked` one that is not saved; an "
        "output of the forward that needs a tangent"
    ),
    "bundle-limit": (
        "more than 1 000 000 nodes in a graph with its bodies, or calls of submodules; more bytes, results or "
        "memory than a reader takes"
    ),
    "operator-set-unknown": "an operator set that the reader does not have",
    "operator-malformed": (
        "an operator that is not `namespace::base` or `namespace::base.overload`, of identifiers; a keyword that "
        "is no identifier, or one of Python's own"
    ),
    "operator-unlisted": (
        "an operator of `aten` that is not in the operator set; one that the tables of section 7 do not have; "
        "`torch::` in a functional graph; a view step by an operator that is not in 10.15; in a lowered graph, "
        "what 15.4 does not name"
    ),
    "operator-undeclared": "an operator of a namespace that the manifest does not declare",
    "operator-schema": (
        "an operator whose signature the graph lacks, or has malformed, of another name, or not compatible with "
        "the operator set"
    ),
    "operator-arguments": (
        "another number of arguments than the operator takes, or one of another name; a body that takes another "
        "number of values than it gets, or one of another kind, dtype or number of axes; a predicate, or result of a "
        "condition, that is no truth value and no tensor of one element; an operand that an operator of the tables of "
        "section 7 does not take: an item of what is no sequence, items by a step of 0, a tensor for a number, an "
        "exponent of an integer that is not written as -64 to 64, a shift to the left that is not written as 0 to 64, "
        "numbers that may have more than 1024 bits, if floats and what no builtin gives have 64"
    ),
    "argument-type": "an argument of another type than the operator takes (7.28)",
    "result-type": (
        "metadata of another type than the operator returns (7.28 to 7.31); an output of a graph of another dtype "
        "or number of axes than `Program.outputs`, or than the input that it is the new value (unless "
        "`metadata` or `storage`) or the gradient of; a constant that stands for a tensor there, or in a body (7.30)"
    ),
    "region-open": "a region or checkpointed part that is not ended, or not as the innermost one",
    "module-malformed": (
        "submodules out of order, or the same as none before; calls of submodules that are no nested runs of "
        "nodes, or lack their structures without a reason"
    ),
    "vector-malformed": (
        "a recorded call of another program, with another number of arguments, a `sample` below 1, `quantiles` "
        "of what is no tensor of floats with a span of its own, fewer than 2 or more than 65, or an error of what is "
        "no value"
    ),
    "target-malformed": (
        "a record of another target than its place; a lowered or compiled program without a functional graph, "
        "with a backward and no gradients or the other way round, or of no partition; a program that target or "
        "manifest lacks"
    ),
    "kernel-malformed": (
        "a kernel without a candidate, or of a malformed name, alignment or number of warps; code outside of its pack, "
        "a pack of another size than recorded"
    ),
    "onnx-malformed": "an ONNX model that is not what the manifest says",
    "signature-invalid": "a signature that is missing, or not of these files and this signer",
}
"""Every code, with what is refused by it."""
