"""The contents of a bundle, for people and for scripts, and the differences of two. It uses no stage of an export."""
