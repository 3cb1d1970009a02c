"""Forward graphs that several programs of one model share."""
