"""The commands that need a bundle and not its model, a file per subject; none imports torch before it has to."""
