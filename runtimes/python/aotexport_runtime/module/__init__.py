"""`BundleModule`: a loaded bundle as an `nn.Module`, and `load`, which makes it.

In come an open bundle and the user's choices, out goes a module whose calls go through `call/`.
"""
