"""Numbers and names in sentences that a user reads."""

import pytest

from interlayer.training.wording import listing, plural, unusable_count


@pytest.mark.parametrize(
    ("items", "text"), [([], ""), (["a"], "a"), (["a", "b"], "a and b"), (["a", "b", "c"], "a, b and c")]
)
def test_a_list_reads_as_in_a_sentence(items, text):
    assert listing(items) == text


def test_one_is_no_plural():
    assert plural(1, "class", "classes") == "1 class"
    assert plural(1200, "image") == "1,200 images"
    assert plural(1.5, "epoch") == "1.5 epochs"


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["a.png"], "1 image"),
        (["a.xml object 4", "b.xml object 13"], "2 annotations"),
        (
            ["c.json annotation 7 (again)", "c.json annotation at position 3", "c.json category 2 (again)"],
            "3 annotations",
        ),
        (["a.png", "c.json image 3", "a.xml object 4"], "2 images and 1 annotation"),
        (["an object 4.png"], "1 image"),
    ],
)
def test_a_skipped_annotation_is_not_an_image(names, text):
    assert unusable_count(names) == text
