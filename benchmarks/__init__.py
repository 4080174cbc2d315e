"""Measurements; `tests` use some of what they are made of."""
