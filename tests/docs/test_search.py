"""Who searches the site finds the page for it among the first three results."""

import pytest

from website import search

pytestmark = pytest.mark.thorough

ANSWERS = {
    "allreduce": "guide",
    "all_gather": "guide",
    "async": "guide",
    "average gradients": "guide",
    "benchmark": "benchmarks",
    "broadcast": "guide",
    "checkpoint": "checkpoints",
    "deadlock": "troubleshooting",
    "docker": "centres",
    "dtensor": "mesh",
    "environment variables": "settings",
    "fsdp": "sharding",
    "gpu": "gpus",
    "halo": "cookbook",
    "hang": "troubleshooting",
    "install": "install",
    "jupyter": "launching",
    "lightning": "coming-from",
    "mean": "guide",
    "mpi4py": "coming-from",
    "out of memory": "sharding",
    "pickle": "guide",
    "pipeline": "fleet",
    "preemption": "launching",
    "pytest": "cookbook",
    "pytorch": "guide",
    "restart": "recovery",
    "s3": "checkpoints",
    "save model": "checkpoints",
    "send": "guide",
    "slurm": "launching",
    "spack": "centres",
    "split data": "guide",
    "sum": "guide",
    "timeout": "troubleshooting",
    "wrong mpi": "install",
}


@pytest.fixture(scope="module")
def found(site):
    if (program := search.node()) is None:
        pytest.skip("there is no node, which runs the search of the site")
    return search.ask(site, ANSWERS, program)


@pytest.mark.parametrize("query", ANSWERS)
def test_the_page_for_a_query_is_among_the_first_three_results(found, query):
    assert ANSWERS[query] in [place.partition(".html")[0] for place in found[query][:3]]


NAMES = ["all_reduce", "shard_tensor", "DataParallel", "ReduceOp", "CollectiveTimeout"]


def test_a_name_of_the_reference_is_among_the_first_results(site, found):
    for name, places in search.ask(site, NAMES, search.node()).items():
        assert any(place.endswith(f"#hpcdist.{name}") for place in places), (name, places)


# ---- how entries are arranged


def entry(location, title, text=""):
    return {"location": location, "title": title, "text": text}


def test_an_attribute_becomes_a_word_of_what_has_it(monkeypatch):
    monkeypatch.setattr(search, "WORDS", {"guide.html": "sum"})
    entries = [
        entry("reference/plans.html#hpcdist.Work", "Work"),
        entry("reference/plans.html#hpcdist.Work.source", "source", "who sent it"),
        entry("guide.html", "User guide"),
    ]
    guide, work = search.arranged(entries, {"hpcdist.Work.source"})
    assert guide["title"].endswith("sum </span>User guide")
    assert work["title"].endswith("Work")
    assert "source who sent it" in work["text"]


def test_words_for_an_entry_that_is_not_there_are_an_error(monkeypatch):
    monkeypatch.setattr(search, "WORDS", {"gone.html": "sum"})
    with pytest.raises(ValueError, match=r"gone\.html"):
        search.arranged([], set())
