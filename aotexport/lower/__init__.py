"""Programs in forms that are faster than the portable one, per target."""
