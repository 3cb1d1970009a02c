"""Inference graphs whose weights stay, by layers of oneDNN."""
