"""Programs in forms that are faster than the portable one, or run elsewhere, one package per target."""
