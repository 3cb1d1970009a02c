"""Float32 matmuls on processors, by the library that is the faster one here: see docs/decisions/0012."""
