"""What is sent: one view, `Buffer`, over every array library.

Read in this order: `dtypes` (the table), `libraries` (one row per array library),
`buffer` (an array becomes a `Buffer`), `layout` (many arrays in one run of memory), `device` and
`transfer` (memory the host cannot touch, and copies of it), `tree` (nested containers of arrays).
"""

from hpcdist.arrays.buffer import Buffer as Buffer, as_buffer as as_buffer, as_output as as_output
from hpcdist.arrays.dtypes import Dtype as Dtype, dtype_row as dtype_row
