"""Generation of tokens by bundles that `aotexport --recipe` made."""
