"""The reference has every field of a strategy, as the table in the source has them."""

from docs_pages import text_of

from hpcdist.fleet.fields import tables

PAGE = "docs/reference/strategy.md"


def test_the_page_has_the_table_of_all_fields():
    assert tables() in text_of(PAGE), f"put this table into {PAGE}:\n{tables()}"
