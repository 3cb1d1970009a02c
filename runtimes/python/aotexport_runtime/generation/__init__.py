"""Generation of tokens: a loop over the programs `prefill` and `decode` of bundles that `aotexport --recipe` made.

Prompts come in, sequences of tokens go out. It calls a loaded bundle as its users do, and knows no graph.
"""
