"""The bundle format: records, versions and their JSON form. Imports msgspec and nothing of torch.

`schemas/README.md` is the normative prose; `schemas/v1/*.schema.json` is generated from these records.
"""
