"""A bundle on disk: opened, checked against its digests, its weights mapped. It does not know how graphs run."""
