"""Every key of a recipe says what it means, and a key that does not exist is answered with the one that was meant."""

from pathlib import Path

import pytest

from interlayer.training.keys import SYNONYMS
from interlayer.training.recipe import SECTIONS, RecipeError, list_keys, load_recipe, recipes_with
from interlayer_cli.recipes import _markdown

DOCS = Path(__file__).parents[2] / "docs"


def test_every_key_has_one_sentence_of_its_own():
    meanings = [key.meaning for key in list_keys().values()]
    assert len(set(meanings)) == len(meanings)
    assert all(meaning and not meaning.endswith(".") for meaning in meanings)
    assert set(SECTIONS) <= set(list_keys())


def test_the_documented_keys_are_the_keys():
    assert (DOCS / "recipes.md").read_text() == _markdown(), "interlayer recipes --markdown > docs/recipes.md"


def test_the_recipes_that_set_a_key_are_found_with_their_values():
    names = ("finetune", "finetune_segmentation")
    assert recipes_with("new_lr_scale") == {name: load_recipe(name).new_lr_scale for name in names}
    assert recipes_with("accumulate") == {}


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("learning_rate", "lr"),
        ("wd", "weight_decay"),
        ("img_size", "image_size"),
        ("amp", "precision"),
        ("ep", "epochs"),
    ],
)
def test_a_key_that_does_not_exist_is_answered_with_the_one_that_was_meant(key, meant):
    with pytest.raises(RecipeError, match=f"unknown key '{key}' in the recipe; did you mean '{meant}'. .*--keys"):
        load_recipe("default", [f"{key}=1"])


def test_synonyms_name_keys_and_hide_none():
    assert set(SYNONYMS.values()) <= set(list_keys())
    assert not set(SYNONYMS) & set(list_keys())
