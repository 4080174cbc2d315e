"""Collectives of groups that span nodes: inside each node, between nodes by lanes, inside again.

A lane has one rank of each node. All lanes are used at once, so that all network adapters of a node
are busy, and what crosses nodes does so once per node instead of once per rank. `nodes` says who is
where, `parts` how an operation goes on part by part, `reductions` and `movements` what is done.

These are multi-leader designs (Bayatpour et al., "Scalable reduction collectives with data
partitioning-based multi-leader design", SC 2017; Träff and Hunold, "Decomposing MPI collectives for
exploiting multi-lane communication", CLUSTER 2020).
"""
