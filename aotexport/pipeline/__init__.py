"""The way from a model to a bundle. `export.py` reads as the whole of it; each other file is a stage.

In come a model, an example call and `ExportOptions`; a `BundleDraft` goes from stage to stage, and out come a directory
and an `ExportReport`. Nothing is known here of operators, records or files: the rooms below do the work of each stage.
"""
