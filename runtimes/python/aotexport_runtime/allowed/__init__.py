"""What a bundle may name: operators of torch, by a list, and layers of `torch.nn`. Nothing is known here of bundles."""
