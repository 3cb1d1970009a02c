"""Products of float32 matrices on processors, by the library that is the faster one here: see docs/decisions/0012."""
