"""Write records, graphs and weights to a directory, and list the files with their digests in the manifest."""
