"""A bundle for servers: named tensors come in and go out, and waiting requests are joined to batches.

`Servable` is the interface. It knows no protocol and no server.
"""
