"""A directory of bundles behind the Open Inference Protocol, over HTTP and gRPC; `endpoints/` is a worker's server."""
