"""A function called on every rank: `spawn`."""
