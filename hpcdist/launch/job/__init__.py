"""One job under way: its processes, what they read and write, and how it ended."""
