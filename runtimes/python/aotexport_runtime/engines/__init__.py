"""Ways to run a program's graphs."""
