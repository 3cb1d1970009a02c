"""Forward graphs that several programs of one model share: one trace serves all programs that do the same."""
