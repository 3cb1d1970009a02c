"""The user's model and its example call, before any trace, and what puts the model back. It knows no graphs."""
