"""What a bundle holds, for scripts and viewers: materials, kernels, graphs. It uses no stage of an export."""
