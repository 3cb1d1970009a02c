"""The forward graph as an engine, as it was captured, with adapters, and with submodules that changed."""
