"""Every test of this folder that takes `loops` runs with the compiled loops and without."""

import pytest

from hpcdist.compiled import load
from hpcdist.ps import accessors, merging, shared, slabs, slots

compiled = load("hpcdist.ps._native")
LOOPS = [
    (merging, "_group"),
    (merging, "_add"),
    (slots, "_find"),
    (slots, "_place"),
    (slabs, "_take"),
    (slabs, "_put"),
    (shared, "_pull"),
    (accessors, "_update_rows"),
]


@pytest.fixture(params=["compiled", "python"])
def loops(request, monkeypatch):
    if request.param == "compiled" and compiled is None:
        pytest.skip("the kernel was not compiled here")
    if request.param == "python":
        for module, name in LOOPS:
            monkeypatch.setattr(module, name, None)
    return request.param
