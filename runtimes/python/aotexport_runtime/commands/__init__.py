"""What users do with bundles beside calling them: test, save and describe them."""
