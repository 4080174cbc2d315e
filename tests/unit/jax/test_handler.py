"""The compiled handler of operations of XLA."""

import pytest

pytest.importorskip("jax")

from hpcdist.jax import handler

pytestmark = pytest.mark.skipif(not handler.IS_THERE, reason="no compiled handler")


def test_the_version_is_that_of_jaxlib():
    major, minor = handler._version()
    assert (major, minor) >= (0, 1)


def test_another_version_of_xlas_interface_is_refused_with_a_sentence(monkeypatch):
    monkeypatch.setattr(handler, "_version", lambda: (7, 2))
    with pytest.warns(RuntimeWarning, match=r"has version 7\.2, .* compiled for 0: .* io_callback"):
        assert not handler.register()


def test_without_the_compiled_part_there_is_no_handler(monkeypatch):
    monkeypatch.setattr(handler, "_handler", None)
    assert not handler.register()
