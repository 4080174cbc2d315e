"""Paddle's import path of what makes multislot text: see `hpcdist.data.generators`."""

from hpcdist.data.generators import (
    DataGenerator as DataGenerator,
    MultiSlotDataGenerator as MultiSlotDataGenerator,
    MultiSlotStringDataGenerator as MultiSlotStringDataGenerator,
)
