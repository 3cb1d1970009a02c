"""The way from a model to a bundle: `export.py` shows all of it, and a `BundleDraft` goes from stage to stage."""
