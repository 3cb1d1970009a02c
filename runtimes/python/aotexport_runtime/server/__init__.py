"""Bundles behind the Open Inference Protocol: KServe's server over servables, and the processes that it runs in."""
