"""Who is there: members of a group, ranks that have died, who is which rank after that."""
