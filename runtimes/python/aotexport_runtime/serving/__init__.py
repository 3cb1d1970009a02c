"""A bundle behind a server: named tensors in and out, requests joined to batches. Knows no server."""
