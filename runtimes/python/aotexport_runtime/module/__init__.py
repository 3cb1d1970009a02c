"""`BundleModule`: a loaded bundle as an `nn.Module`, and `load`, which makes it.

It takes an open bundle and the user's choices, and returns a module whose calls go through `call/`.
"""
