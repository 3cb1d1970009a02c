"""Commands on bundles beside calls: test, save and describe them."""
