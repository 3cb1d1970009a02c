"""What a bundle holds and how its programs run, for people. `report` needs matplotlib and jinja2."""
