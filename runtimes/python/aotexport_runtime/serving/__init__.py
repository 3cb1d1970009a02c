"""A bundle for servers: named tensors come in and go out, and waiting calls are joined. It knows no protocol."""
