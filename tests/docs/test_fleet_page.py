"""The page about fleet has every field of a strategy, as the table in the source has them."""

from docs_pages import text_of

from hpcdist.fleet.fields import tables


def test_the_page_has_the_table_of_all_fields():
    assert tables() in text_of("docs/fleet.md"), f"put this table there:\n{tables()}"
