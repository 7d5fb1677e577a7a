"""Samples of given lengths, and every way to ask for them wrongly."""

import numpy as np
import pytest

from swiftlite.data.mock import MockSamples, mock_lengths
from swiftlite.data.sample import digest
from swiftlite.errors import UserError

FLAG = "--sft_mock_dataset_config_json"
LOGNORMAL = {
    "mode": "distribution",
    "type": "lognormal",
    "min_seq_len": 1024,
    "max_seq_len": 8192,
    "mean_seq_len": 4096,
    "lognormal_sigma": 1.1,
}


def test_lognormal_lengths_have_their_mean_before_they_are_cut():
    wide = LOGNORMAL | {"min_seq_len": 1, "max_seq_len": 10**9, "lognormal_sigma": 0.5}
    lengths = mock_lengths(wide, num_samples=200_000)
    # Standard error of the mean: 4096 * sqrt(exp(0.25) - 1) / sqrt(200_000) = 4.9; and 0.5 for what int() cuts off.
    assert abs(lengths.mean() + 0.5 - 4096) < 4 * 4.9
    assert np.log(lengths).std() == pytest.approx(0.5, rel=0.01)

    cut = mock_lengths(LOGNORMAL)
    assert (len(cut), cut.min(), cut.max()) == (100_000, 1024, 8192)
    drawn = mock_lengths(LOGNORMAL | {"min_seq_len": 1, "max_seq_len": 10**9})
    assert (cut == np.clip(drawn, 1024, 8192)).all()


def test_samples_depend_on_seed_and_index_alone():
    config = LOGNORMAL | {"max_seq_len": 4096, "mean_seq_len": 1500}
    samples = MockSamples(mock_lengths(config, seed=1, num_samples=50), vocab_size=100, seed=1)
    assert len(samples) == 50
    backwards = [samples[i] for i in reversed(range(50))]
    assert digest(samples) == digest(reversed(backwards))
    assert [len(sample) for sample in samples] == samples.lengths.tolist()
    assert digest(samples) != digest(MockSamples(samples.lengths, vocab_size=100, seed=2))
    tokens = np.concatenate([sample.input_ids for sample in samples])
    assert (tokens.min(), tokens.max()) == (0, 99)
    assert samples[3].num_trained_tokens == len(samples[3]) - 1
    assert not np.array_equal(samples[0].input_ids[:100], samples[1].input_ids[:100])
    with pytest.raises(IndexError):
        samples[50]


@pytest.mark.parametrize("text", ["12\n7\n4096\n", "seq_len\n12\n7\n4096", "\ufefflength\r\n12\r\n7\r\n\r\n4096\r\n"])
def test_lengths_from_a_file(tmp_path, text):
    path = tmp_path / "lengths.csv"
    path.write_text(text, encoding="utf-8", newline="")
    config = {"mode": "file", "path": str(path)}
    lengths = mock_lengths(config)
    assert lengths.tolist() == [12, 7, 4096]
    assert [len(sample) for sample in MockSamples(lengths, vocab_size=10, seed=42)] == [12, 7, 4096]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, ': "mode" is null, not "file" or "distribution"'),
        ({"mode": "files"}, ': "mode" is "files", not "file" or "distribution"'),
        ({"mode": ["file"]}, ': "mode" is ["file"], not "file" or "distribution"'),
        ({"mode": "file"}, ': mode file needs "path"'),
        ({"mode": "file", "path": 3}, ': "path": 3 is not text'),
        ({"mode": "file", "path": "a", "seed": 1}, ': "seed" is no key of mode file'),
        (LOGNORMAL | {"sigma": 1}, ': "sigma" is no key of mode distribution'),
        ({"mode": "distribution", "type": "lognormal"}, ': mode distribution needs "lognormal_sigma"'),
        (LOGNORMAL | {"type": "normal"}, ': "type": "normal" is not known; known is "lognormal"'),
        (LOGNORMAL | {"min_seq_len": 0}, ': "min_seq_len": 0 is not a whole number of at least 1'),
        (LOGNORMAL | {"max_seq_len": 99.5}, ': "max_seq_len": 99.5 is not a whole number of at least 1'),
        (LOGNORMAL | {"max_seq_len": True}, ': "max_seq_len": true is not a whole number of at least 1'),
        (LOGNORMAL | {"mean_seq_len": "4096"}, ': "mean_seq_len": "4096" is not a number of at least 0'),
        (LOGNORMAL | {"lognormal_sigma": -1}, ': "lognormal_sigma": -1 is not a number of at least 0'),
        (LOGNORMAL | {"lognormal_sigma": float("nan")}, ': "lognormal_sigma": NaN is not a number of at least 0'),
        (LOGNORMAL | {"min_seq_len": 9000}, ': "min_seq_len": 9000 is over max_seq_len, 8192'),
        (LOGNORMAL | {"mean_seq_len": 100}, ': "mean_seq_len": 100 is not from min_seq_len to max_seq_len, 1024'),
    ],
)
def test_what_a_person_is_told_about_the_value(config, message):
    with pytest.raises(UserError) as caught:
        mock_lengths(config)
    assert caught.value.problem.startswith(FLAG + message)
    assert '"mode": "' in caught.value.hint  # an example to copy


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("len\n5\nsix\n", ":3: 'six' is no length\n    one whole number of at least 1 on each line"),
        ("5\n0\n", ":2: '0' is no length"),
        ("5\n-3\n", ":2: '-3' is no length"),
        ("5,6\n7,8\n", ":1: '5,6' is no length"),
        ("5\n1.5\n", ":2: '1.5' is no length"),
        ("length\n", " holds no lengths\n    one length on each line"),
    ],
)
def test_what_a_person_is_told_about_the_file(tmp_path, text, message):
    path = tmp_path / "lengths.csv"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        mock_lengths({"mode": "file", "path": str(path)})
    assert str(caught.value).startswith(f"{path}{message}")


def test_a_file_that_is_not_there(tmp_path):
    path = tmp_path / "no.csv"
    with pytest.raises(UserError) as caught:
        mock_lengths({"mode": "file", "path": str(path)})
    assert str(caught.value).startswith(f"{FLAG}: {path}: No such file or directory\n")
