"""Values of calls: trees, sizes, dtypes, tensor subclasses, arrays, and how two calls compare. It knows no bundles."""
