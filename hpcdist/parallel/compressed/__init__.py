"""Averages of gradients that travel compressed, over networks that are slower than encoding.

Read in this order: `options` (what ``compress=`` may be), `encodings` (pure),
`steps` (operations of which any rank may call off the rest), `scheme` with `encoded` and `low_rank`
(how a bucket travels), `lanes` (over which groups), `averages` (one bucket after the other).
"""
