"""The names that a bundle may use: operators of torch, by a list, and layers of `torch.nn`. It knows no bundles."""
