"""What is sent: one view, `Buffer`, over every array library.

Read in this order: `dtypes` (the table), `interface` (what an array library and a device bring),
`libraries` (which one an array is of), `buffer` (an array becomes a `Buffer`), `packing` (many
arrays in one run of memory), `device` and `transfer` (memory the host cannot touch, and copies of
it), `trees` (nested containers of arrays).
"""

from hpcdist.arrays.buffer import Buffer as Buffer, as_buffer as as_buffer, as_output as as_output
from hpcdist.arrays.dtypes import Dtype as Dtype, dtype_row as dtype_row
