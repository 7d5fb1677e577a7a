"""Test samples of given lengths, and invalid settings for them."""

import numpy as np
import pytest

from swiftlite.base.errors import UserError
from swiftlite.data.rows.mock import MockSamples, mock_lengths
from swiftlite.data.sample import digest
from tests.messages import mentions, naming

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


def test_the_largest_length_of_a_file(tmp_path):
    path = tmp_path / "lengths.csv"
    path.write_text(f"{2**31 - 1}\n")
    assert mock_lengths({"mode": "file", "path": str(path)}).tolist() == [2**31 - 1]
    path.write_text(f"1\n{2**31}\n")
    with pytest.raises(UserError, match=naming(f"{path}:2 '{2**31}'")):
        mock_lengths({"mode": "file", "path": str(path)})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, '"mode" null "file" "distribution"'),
        ({"mode": "files"}, '"mode" "files" "file" "distribution"'),
        ({"mode": ["file"]}, '"mode" ["file"] "file" "distribution"'),
        ({"mode": "file"}, 'file "path"'),
        ({"mode": "file", "path": 3}, '"path" 3'),
        ({"mode": "file", "path": "a", "seed": 1}, '"seed" file'),
        (LOGNORMAL | {"sigma": 1}, '"sigma" distribution'),
        ({"mode": "distribution", "type": "lognormal"}, 'distribution "lognormal_sigma"'),
        (LOGNORMAL | {"type": "normal"}, '"type" "normal" "lognormal"'),
        (LOGNORMAL | {"min_seq_len": 0}, '"min_seq_len" 0 1'),
        (LOGNORMAL | {"max_seq_len": 99.5}, '"max_seq_len" 99.5 1'),
        (LOGNORMAL | {"max_seq_len": True}, '"max_seq_len" true 1'),
        (LOGNORMAL | {"mean_seq_len": "4096"}, '"mean_seq_len" "4096" 0'),
        (LOGNORMAL | {"lognormal_sigma": -1}, '"lognormal_sigma" -1 0'),
        (LOGNORMAL | {"lognormal_sigma": float("nan")}, '"lognormal_sigma" NaN 0'),
        (LOGNORMAL | {"min_seq_len": 9000}, '"min_seq_len" 9000 max_seq_len 8192'),
        (LOGNORMAL | {"mean_seq_len": 100}, '"mean_seq_len" 100 min_seq_len max_seq_len 1024'),
    ],
)
def test_what_a_person_is_told_about_the_value(config, message):
    with pytest.raises(UserError) as caught:
        mock_lengths(config)
    assert mentions(caught.value.problem, f"{FLAG} {message}")
    assert '"mode": "' in caught.value.hint  # an example to copy


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("len\n5\nsix\n", ":3 'six' 1"),
        ("5\n0\n", ":2 '0'"),
        ("5\n-3\n", ":2 '-3'"),
        ("5,6\n7,8\n", ":1 '5,6'"),
        ("5\n1.5\n", ":2 '1.5'"),
        ("length\n", ""),
    ],
)
def test_what_a_person_is_told_about_the_file(tmp_path, text, message):
    path = tmp_path / "lengths.csv"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        mock_lengths({"mode": "file", "path": str(path)})
    assert mentions(str(caught.value), f"{path}{message}")


def test_a_file_that_is_not_there(tmp_path):
    path = tmp_path / "no.csv"
    with pytest.raises(UserError) as caught:
        mock_lengths({"mode": "file", "path": str(path)})
    assert mentions(str(caught.value), f"{FLAG} {path}")
