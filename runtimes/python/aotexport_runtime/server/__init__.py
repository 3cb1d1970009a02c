"""Bundles behind the Open Inference Protocol: a directory of bundles comes in, answers over HTTP and gRPC go out.

`repository.py` loads and replaces versions as servables, `supervisor.py` keeps worker processes running, and
`endpoints/` is a worker's server. How a bundle is called is the matter of `serving/`.
"""
