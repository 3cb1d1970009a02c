"""Whether the rows of a batch know of each other: read off a program's forward graph, by operators. No torch."""
