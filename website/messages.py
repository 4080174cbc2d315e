"""The picture of messages: what is sent first need not be received first."""

from __future__ import annotations

import numpy as np

import hpcdist as dist
from website.svg import QUIET, RANKS, Picture

SENT = (("A", 1), ("B", 2), ("C", 1))
"""What rank 0 sends, in this order: a letter and a tag."""

WANTED = (2, 1, 1)
"""The tags that rank 1 receives with, in this order."""


def messages() -> Picture:
    """Draw what rank 0 sends, and which of it each receive of rank 1 takes."""
    _, received = dist.simulate(2, _exchange)
    picture = Picture(640, 190, "Messages are matched by tag, in the order in which they were sent")
    picture.text(120, 22, "rank 0 sends", 12.5, bold=True)
    picture.text(320, 22, "kept until asked for", 12.5, fill=QUIET)
    picture.text(520, 22, "rank 1 receives", 12.5, bold=True)
    picture.box(268, 40, 104, 134, stroke=QUIET, dashed=True)
    for place, (letter, tag) in enumerate(SENT):
        y = 50 + place * 42
        picture.text(40, y + 15, f"send {letter}, tag={tag}", 12, anchor="start", mono=True)
        picture.arrow(180, y + 15, 264, y + 15)
        picture.cell(300, y, 40, 30, [0], letter)
        taker = received.index(letter)
        picture.arrow(376, y + 15, 428, 65 + taker * 42, stroke=RANKS[0])
    for place, (tag, letter) in enumerate(zip(WANTED, received, strict=True)):
        y = 50 + place * 42
        picture.text(436, y + 15, f"recv tag={tag}", 12, anchor="start", mono=True)
        picture.cell(556, y, 40, 30, [0], letter)
    return picture


def _exchange() -> list[str]:
    """Return the letters that this rank has received, in order."""
    dist.init_parallel_env()
    if dist.get_rank() == 0:
        for letter, tag in SENT:
            dist.send(np.array([ord(letter)]), dst=1, tag=tag)
        return []
    box = np.zeros(1, int)
    received = []
    for tag in WANTED:
        dist.recv(box, src=0, tag=tag)
        received.append(chr(box[0]))
    return received
