"""Fine-tuning from the command line: data, losses, the loop, checkpoints, curves. The model's code is not needed."""
