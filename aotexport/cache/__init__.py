"""Finished exports, kept for the next export of the same model: what an export reads, and the directory of entries.

An entry is found by a digest of all that an export reads. What cannot be digested is named, and the export is neither
kept nor looked for: a bundle of another model would be worse than any time that is saved.
"""
