"""Programs of one model: forward graphs that several programs share."""
