"""`BundleModule`: a loaded bundle as an `nn.Module`, and `load`, which makes it."""
