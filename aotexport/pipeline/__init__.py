"""The way from a model to a bundle: `export.py` shows all of it, and each other file is a stage.

A `BundleDraft` goes from stage to stage, from a model, an example call and `ExportOptions` to a directory and an
`ExportReport`. The stages know nothing of operators, records or files: the packages below do their work.
"""
