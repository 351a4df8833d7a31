"""What a comparison says about controls: whose the gain is."""

import json
import sys

import pytest
from digit_images import SMALL
from run_folders import assert_same_run

from interlayer.experiments import Comparison, Difference, compare, comparison_table, networks_of
from interlayer.experiments.attribution import ControlDifference, finding
from interlayer.experiments.compare import recipe_for
from interlayer.experiments.costs import NetworkCost
from interlayer.experiments.record import RECORD_FILE, read_record
from interlayer.experiments.results import controls_among, read_results
from interlayer.models.names import control_networks
from interlayer.tasks import Metric
from interlayer.training import Stopped, TrainingError
from interlayer.training.recipe import from_values

ACCURACY, ERROR = Metric("accuracy", percent=True), Metric("mean_error", higher_is_better=False)
VIT, LIGHT = "vit_tiny_patch16_224", "vit_tiny_patch16_224+mrla_light"
CUT, CONVOLUTION = (network.name for network in control_networks(LIGHT))
GAIN = Difference(0.14, 0.13, 0.15, 0.001)


def words(difference, gain=GAIN, metric=ACCURACY):
    return ControlDifference(control_networks(LIGHT)[0], difference).sentence(gain, "plain", metric)


@pytest.mark.parametrize(
    ("difference", "conclusion"),
    [
        (
            Difference(-0.004, -0.019, 0.011, 0.4),
            "the gain is not shown to be from attending to other layers, at most 1.10 of 14.00 points are.",
        ),
        (
            Difference(0.02, -0.11, 0.15, 0.4),
            "these runs do not tell whether the gain is from attending to other layers.",
        ),
        (Difference(0.03, 0.02, 0.04, 0.01), "3.00 of the 14.00 points are from attending to other layers."),
        (Difference(0.15, 0.14, 0.16, 0.01), "the gain is from attending to other layers."),
        (
            Difference(-0.03, -0.04, -0.02, 0.01),
            "the gain is not from attending to other layers, which costs 3.00 points.",
        ),
        (Difference(0.03, 0.02, 0.04, 0.04, 0.08), "at most 4.00 of 14.00 points are."),
        (
            Difference(-0.03, -0.04, -0.02, 0.04, 0.08),
            "points: the gain is not shown to be from attending to other layers.",
        ),
    ],
)
def test_whose_a_gain_is(difference, conclusion):
    text = words(difference)
    assert text.startswith("Over its control mrla_light:cross_layer=false (no layer reads the one before it): ")
    assert difference.format(ACCURACY) in text
    assert text.endswith(conclusion)


@pytest.mark.parametrize("gain", [Difference(0.01, -0.01, 0.03, 0.3), Difference(-0.1, -0.12, -0.08, 0.001)])
@pytest.mark.parametrize(
    ("difference", "conclusion"),
    [
        (Difference(0.01, -0.01, 0.03, 0.3), "points: these runs show no effect of attending to other layers."),
        (Difference(-0.02, -0.03, -0.01, 0.01), "points: attending to other layers costs 2.00 points."),
        (
            Difference(0.02, 0.01, 0.03, 0.01),
            "attending to other layers gains 2.00 points, although the network is not shown to be better than plain.",
        ),
    ],
)
def test_without_a_gain_the_effect_alone_is_told(difference, conclusion, gain):
    assert words(difference, gain).endswith(conclusion)


def test_nothing_is_said_of_a_plain_network_that_is_not_there():
    text = words(Difference(0.02, 0.01, 0.03, 0.01), None)
    assert text.endswith("points: attending to other layers gains 2.00 points.")


def test_of_an_error_less_is_better():
    gain = Difference(-0.14, -0.15, -0.13, 0.001)
    assert words(Difference(-0.03, -0.04, -0.02, 0.01), gain, ERROR).endswith(
        "0.0300 of the 0.1400 are from attending to other layers."
    )
    assert words(Difference(0.004, -0.011, 0.019, 0.4), gain, ERROR).endswith("at most 0.0110 of 0.1400 are.")


def test_one_seed_says_nothing():
    assert words(Difference(0.02, None, None)).endswith("+2.00 points with one seed, which says nothing about noise.")


CLEAR, NOISE = Difference(0.03, 0.02, 0.04, 0.01), Difference(0.01, -0.01, 0.03, 0.3)


@pytest.mark.parametrize(
    ("gain", "controls", "complete", "expected"),
    [
        (GAIN, [CLEAR, CLEAR], True, "shown"),
        (GAIN, [], True, "shown"),
        (GAIN, [CLEAR, NOISE], True, "something else"),
        (GAIN, [CLEAR, Difference(-0.03, -0.04, -0.02, 0.01)], True, "something else"),
        (GAIN, [CLEAR, Difference(0.02, -0.11, 0.15, 0.4)], True, "undecided"),
        (GAIN, [CLEAR], False, "undecided"),
        (GAIN, [NOISE], False, "something else"),
        (NOISE, [CLEAR], True, "not shown"),
        (Difference(-0.03, -0.04, -0.02, 0.01), [CLEAR], False, "not shown"),
        (Difference(0.03, 0.02, 0.04, 0.04, 0.08), [], True, "not shown"),
        (Difference(0.1, None, None), [], True, "undecided"),
        (GAIN, [Difference(0.1, None, None)], True, "undecided"),
    ],
)
def test_what_is_shown(gain, controls, complete, expected):
    """A gain that a control has too must not pass for the mechanism's, and one seed must not decide."""
    network = control_networks(LIGHT)[0]
    found = [ControlDifference(network, difference) for difference in controls]
    assert finding(gain, found, ACCURACY, complete=complete) == expected


def test_of_an_error_a_bound_is_the_other_end():
    gain, network = Difference(-0.14, -0.15, -0.13, 0.001), control_networks(LIGHT)[0]
    most = ControlDifference(network, Difference(0.004, -0.011, 0.019, 0.4))
    assert finding(gain, [most], ERROR) == "something else"
    unclear = ControlDifference(network, Difference(-0.02, -0.15, 0.11, 0.4))
    assert finding(gain, [unclear], ERROR) == "undecided"


def test_controls_follow_their_network_and_are_not_named_twice():
    assert networks_of([LIGHT], control=True) == [VIT, LIGHT, CUT, CONVOLUTION]
    assert networks_of([LIGHT], control="mildest") == [VIT, LIGHT, CUT]
    base = f"{VIT}+mrla_base"
    assert networks_of([VIT, LIGHT, base], control=True) == [
        VIT,
        LIGHT,
        CUT,
        CONVOLUTION,
        base,
        f"{base}:cross_layer=false",
    ]
    rla = "preresnet20_cifar+rla"
    controls = [f"{rla}:cross_layer=false", f"{rla}:exchange=false"]
    assert networks_of([rla], control=True) == ["preresnet20_cifar", rla, *controls]
    assert networks_of([rla], control=True, task="detect") == ["preresnet20_cifar", rla, controls[0]], (
        "a detector reads no state"
    )
    assert networks_of([VIT, CONVOLUTION, LIGHT], control=True) == [VIT, CONVOLUTION, LIGHT, CUT]
    assert networks_of([VIT, f"{VIT}+cb"], control=True) == [VIT, f"{VIT}+cb"]
    assert networks_of(["resnet50_mrla_light"], control="mildest") == [
        "resnet50", "resnet50_mrla_light", "resnet50_mrla_light:cross_layer=false",
    ]  # fmt: skip
    assert networks_of([CONVOLUTION], control=True) == [VIT, CONVOLUTION]


def test_controls_are_known_by_their_options_also_if_a_user_names_them():
    """An earlier comparison, and one whose networks were all given by hand, say whose the gain is."""
    recipe = from_values(SMALL)
    other = f"{LIGHT}:attention=false,init=paper"
    found = controls_among([VIT, LIGHT, CONVOLUTION], recipe)
    assert [[network.name for network in networks] for networks in found.values()] == [[], [CONVOLUTION], []]
    assert controls_among([VIT, LIGHT, other], recipe)[LIGHT] == []
    assert controls_among([CUT, CONVOLUTION], recipe)[CUT][0].name == CONVOLUTION


def finished(folder, values):
    """Writes the summaries of finished runs."""
    folders = {}
    for name, found in values.items():
        folders[name] = {}
        for seed, value in enumerate(found):
            path = folder / name / f"seed{seed}"
            path.mkdir(parents=True)
            (path / "summary.json").write_text(json.dumps({"test": {"accuracy": value, "images": 10_000}}))
            folders[name][seed] = path
    return folders


def test_decisions_are_adjusted_to_all_tests_and_to_no_others(tmp_path):
    """One network with two controls: three tests. The controls' own differences to the plain network are not tested."""
    values = {
        VIT: [0.58, 0.581, 0.582],
        LIGHT: [0.72, 0.722, 0.721],
        CUT: [0.70, 0.703, 0.702],
        CONVOLUTION: [0.726, 0.722, 0.724],
    }
    costs = dict.fromkeys(values, NetworkCost(1, 1, 1, 1.0, 1))
    plain, light, cut, convolution = read_results(from_values(SMALL), finished(tmp_path, values), ACCURACY, costs)
    assert [len(result.tested) for result in (plain, light, cut, convolution)] == [0, 3, 0, 0]
    p = sorted(difference.p for difference in light.tested)
    adjusted = sorted(difference.adjusted_p for difference in light.tested)
    assert adjusted == pytest.approx([3 * p[0], max(3 * p[0], 2 * p[1]), max(2 * p[1], p[2])])
    assert cut.difference.adjusted_p is None
    assert (cut.control_of, convolution.control_of, light.control_of) == (LIGHT, LIGHT, "")
    assert light.controls[0].difference.mean == pytest.approx(light.mean - cut.mean)
    first, second = (each.sentence(light.difference, VIT, ACCURACY) for each in light.controls)
    assert first.endswith("1.93 of the 14.00 points are from attending to other layers.")
    assert second.endswith("of 14.00 points are."), second


def test_differences_are_over_the_seeds_that_both_networks_have(tmp_path):
    """While runs are missing, values of different seeds must not be paired."""
    values = {
        VIT: [0.58, 0.60, 0.59],
        LIGHT: [0.70, 0.73, 0.71],
        CUT: [0.69, 0.72, 0.705],
        CONVOLUTION: [0.7, 0.7, 0.7],
    }
    folders = finished(tmp_path, values)
    del folders[VIT][0], folders[LIGHT][2], folders[CUT][1], folders[CONVOLUTION][0], folders[CONVOLUTION][1]
    costs = dict.fromkeys(values, NetworkCost(1, 1, 1, 1.0, 1))
    plain, light, cut, convolution = read_results(from_values(SMALL), folders, ACCURACY, costs)
    assert (plain.seeds, light.seeds, cut.seeds) == ([1, 2], [0, 1], [0, 2])
    assert (light.difference.mean, light.difference.low) == (pytest.approx(0.13), None)
    assert [(each.network.name, each.difference.mean) for each in light.controls] == [(CUT, pytest.approx(0.01))]
    assert convolution.difference.mean == pytest.approx(0.11)


def read(folder, values, **options):
    """Returns the comparison of networks with these values, without runs."""
    recipe, costs = from_values(SMALL), dict.fromkeys(values, NetworkCost(1, 1, 1, 1.0, 1))
    results = read_results(recipe, finished(folder, values), ACCURACY, costs)
    return Comparison(recipe, folder, ACCURACY, [0, 1, 2], results, 1, "", **options)


def test_the_first_network_is_compared_with_its_controls_too(tmp_path):
    found = read(tmp_path, {LIGHT: [0.72, 0.722, 0.721], CONVOLUTION: [0.70, 0.703, 0.702]})
    name, sentence = found.verdicts()[0].splitlines()
    assert name == f"{LIGHT}:"
    assert sentence.endswith("+1.93 (+1.79 to +2.08) points: layer attention gains 1.93 points."), sentence


def test_a_control_that_is_the_first_network_is_one_test(tmp_path):
    found = read(tmp_path, {CONVOLUTION: [0.70, 0.703, 0.702], LIGHT: [0.72, 0.722, 0.721]})
    assert len(found.tested) == 1
    light = found.results[1]
    assert light.difference == light.controls[0].difference
    assert "although" not in found.verdicts()[0]


def test_a_finding_needs_the_plain_network_and_the_mildest_control(tmp_path):
    """The convolution alone does not tell whether reading other layers helps, nor does another mechanism."""
    eca = f"{VIT}+eca"
    plain, light, cut = [0.58, 0.581, 0.582], [0.72, 0.722, 0.721], [0.70, 0.703, 0.702]
    whole = read(tmp_path / "a", {VIT: plain, LIGHT: light, CUT: cut, CONVOLUTION: cut})
    assert whole.finding(whole.results[1]) == "shown"
    harsh = read(tmp_path / "b", {VIT: plain, LIGHT: light, CONVOLUTION: cut})
    assert harsh.finding(harsh.results[1]) == "undecided"
    other = read(tmp_path / "c", {eca: plain, LIGHT: light, CUT: cut, CONVOLUTION: cut})
    assert other.finding(other.results[1]) == "undecided"
    assert "not shown to be better than" not in other.verdicts()[0]


def test_a_control_without_a_seed_of_its_network_is_shown(tmp_path):
    folders = finished(tmp_path, {VIT: [0.58, 0.581], LIGHT: [0.72, 0.722], CUT: [0.70, 0.703]})
    del folders[LIGHT][1], folders[CUT][0]
    recipe, costs = from_values(SMALL), dict.fromkeys(folders, NetworkCost(1, 1, 1, 1.0, 1))
    results = read_results(recipe, folders, ACCURACY, costs)
    table = comparison_table(Comparison(recipe, tmp_path, ACCURACY, [0, 1], results, 1, ""))
    assert [row[0] for row in table.rows] == [VIT, LIGHT, f"control {CUT}"]


def test_a_run_without_the_metric_is_named(tmp_path):
    with pytest.raises(TrainingError, match=r"seed1 has no accuracy on test images"):
        read(tmp_path, {VIT: [0.5, None]})


RECIPE = {
    **SMALL,
    "model_options": {"patch_size": 4, "embed_dim": 16, "depth": 3, "num_heads": 2},
    "attach_options": {"stages": [3], "channels_per_head": 8},
    "optimizer": "adamw",
    "lr": 0.003,
    "epochs": 1,
}


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    folder = tmp_path_factory.mktemp("controls") / "whole"
    return compare(from_values(RECIPE), [LIGHT], folder, seeds=[0, 1], control=True, command="interlayer compare")


def test_a_comparison_with_controls_says_it_first(comparison):
    assert [result.model for result in comparison.results] == [VIT, LIGHT, CUT, CONVOLUTION]
    light = comparison.results[1]
    assert [each.network.name for each in light.controls] == [CUT, CONVOLUTION]
    first, second, *_, last = comparison.verdicts()
    assert first.startswith(f"{LIGHT} ")
    assert first.count("Over its control mrla_light:") == 2
    assert second == f"{LIGHT}: {light.contribution.sentence}."
    assert "would tell a difference of half a point" in last
    assert not any(text.startswith(CUT) for text in comparison.verdicts())
    written = json.loads((comparison.folder / "comparison.json").read_text())
    assert [model["control_of"] for model in written["models"]] == [None, None, LIGHT, LIGHT]
    assert written["models"][1]["controls"][0]["difference"]["mean"] == light.controls[0].difference.mean
    assert written["models"][1]["difference"]["adjusted_p"] == light.difference.adjusted_p


def test_the_same_seed_starts_a_control_from_the_same_weights(comparison):
    """So that the difference to the mildest control is only what is read."""
    from interlayer.training.processes import init_processes
    from interlayer.training.setup import set_up

    whole, cut = (
        set_up(recipe_for(comparison.recipe, name, 1), init_processes(comparison.recipe), None).network.state_dict()
        for name in (LIGHT, CUT)
    )
    assert list(whole) == list(cut)
    assert all((whole[name] == cut[name]).all() for name in whole)


def test_the_table_shows_the_contribution_and_the_cost_of_every_network(comparison):
    table = comparison_table(comparison)
    assert [row[0] for row in table.rows] == [
        VIT, LIGHT, "control mrla_light:cross_layer=false", "control mrla_light:attention=false",
    ]  # fmt: skip
    light = comparison.results[1]
    cells = dict(zip(table.columns, table.rows[1], strict=True))
    assert cells["change of blocks"] == light.contribution.range
    assert cells["switched off"] == f"{light.contribution.value_without:.2%}"
    assert cells["training"].startswith("1 x ")
    assert cells["memory"].endswith(f"({light.cost.memory / comparison.results[0].cost.memory:.2f}x)")
    assert table.rows[0][3:5] == ["", ""]
    assert "adjusted to 3 tests (Holm)" in table.note
    wider = comparison_table(comparison, over_controls=True)
    column = wider.columns.index("its network over this control")
    over = [each.difference.format(comparison.metric) for each in light.controls]
    assert [row[column] for row in wider.rows] == ["", "", *over]
    assert [row[:column] + row[column + 1 :] for row in wider.rows] == table.rows


def test_controls_are_added_to_a_finished_comparison(comparison, tmp_path):
    """Runs that exist are not run again, and the others are those of a comparison that had controls from the start."""
    before = compare(comparison.recipe, [LIGHT], tmp_path, seeds=[0, 1], command="interlayer compare --first")
    assert "interlayer resume" not in before.verdicts()[0] or before.results[1].mean > before.results[0].mean
    times = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/*/summary.json")}
    after = compare(comparison.recipe, [LIGHT], tmp_path, seeds=[0, 1], control=True, resume=True)
    assert len(times) == 4
    assert {path: path.stat().st_mtime_ns for path in times} == times
    for ours, theirs in zip(after.results, comparison.results, strict=True):
        for a, b in zip(ours.folders, theirs.folders, strict=True):
            assert_same_run(a, b)
    record = read_record(tmp_path)
    assert record.models == [VIT, LIGHT, CUT, CONVOLUTION]
    assert record.command == "interlayer compare --first"
    assert record.control is True


def test_a_stopped_comparison_with_controls_goes_on_with_the_same_ones(comparison, tmp_path, monkeypatch):
    """What its networks cost is not measured again, which takes time of every piece of a long comparison."""
    count = iter(range(10**9))
    with pytest.raises(Stopped):
        compare(comparison.recipe, [LIGHT], tmp_path, seeds=[0, 1], control=True, stop=lambda: next(count) > 20)
    monkeypatch.setattr(sys.modules["interlayer.experiments.compare"], "static_cost", None)
    again = compare(comparison.recipe, read_record(tmp_path).models, tmp_path, seeds=[0, 1], resume=True)
    assert [result.cost.memory for result in again.results] == [
        costs["memory"] for costs in read_record(tmp_path).costs.values()
    ]
    assert [result.values for result in again.results] == [result.values for result in comparison.results]
    assert again.verdicts()[0] == comparison.verdicts()[0]


def test_a_gain_without_a_control_names_the_command_that_adds_them(comparison):
    from dataclasses import replace

    plain, light = comparison.results[:2]
    better = replace(light, controls=[], difference=GAIN)
    text = replace(comparison, results=[plain, better]).verdicts()[0]
    command = f"`interlayer resume {comparison.folder} --control`"
    assert text.endswith(f"whether this is from attending to other layers: {command} trains the networks that do.")
    worse = replace(light, controls=[], difference=Difference(-0.1, -0.2, -0.05, 0.01))
    assert "resume" not in replace(comparison, results=[plain, worse]).verdicts()[0]


def test_a_network_that_reads_no_other_layer_says_that_the_plain_one_is_its_control(comparison, tmp_path):
    recipe = comparison.recipe.replace(attach_options={})
    found = compare(recipe, [f"{VIT}+cb"], tmp_path, seeds=[0], control=True)
    assert len(found.results) == 2
    assert f"{VIT}+cb: the plain network is its control, because it reads no other layer" in found.notes


def test_a_record_of_an_earlier_version_can_be_read(comparison, tmp_path):
    (tmp_path / RECORD_FILE).write_text('{"models": ["a", "b"], "seeds": [0], "together": null, "command": "x"}')
    record = read_record(tmp_path)
    assert (record.control, record.epochs, record.epoch_seconds) == (False, {}, {})


def test_equal_time_needs_a_comparison_that_was_started_with_it(comparison):
    with pytest.raises(TrainingError, match="was started without --equal-time"):
        compare(comparison.recipe, [LIGHT], comparison.folder, seeds=[0, 1], equal_time=True, resume=True)
