"""What the site of the documentation is made with: its reading of docstrings, its pictures."""
