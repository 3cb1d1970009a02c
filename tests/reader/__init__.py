"""A second reader of the format, from `schemas/README.md` alone: plain torch operator calls, slow and short.

It shares no code with the runtime, and runs the recorded calls of the goldens by both graphs. Docstrings name the
sections that it is written from. Rules have names, and can be switched off one at a time: what no golden notices then
has no test in the goldens.
"""
