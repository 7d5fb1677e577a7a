"""Test reward models in the process of reward functions against transformers."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from swiftlite.base.errors import UserError
from swiftlite.rewards.process import RewardProcess
from swiftlite.rewards.settings import RewardSettings
from tests.messages import naming
from tests.tiny import make_tiny_hf, make_tiny_tokenizer
from tests.train.reward_models import hf_scores, make_reward_model

PROMPTS = [[{"role": "user", "content": f"Say {n}."}] for n in range(5)]
COMPLETIONS = ["yes", "no, " * 9, "", "It is 4.", "perhaps"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return make_reward_model(tmp_path_factory.mktemp("models") / "judge")


def process(*models: Path, names: tuple[str, ...] = ()) -> RewardProcess:
    settings = RewardSettings(reward_models=tuple(map(str, models)), max_completion_length=4)
    return RewardProcess([*names, *(model.name for model in models)], (), settings)


def conversations() -> list[list[dict[str, str]]]:
    return [
        [*prompt, {"role": "assistant", "content": text}] for prompt, text in zip(PROMPTS, COMPLETIONS, strict=True)
    ]


def test_scores_are_transformers(directory, tmp_path):
    """The second model has another tokenizer and another chat template."""
    other = make_reward_model(tmp_path / "other", seed=1)
    tokenizer = make_tiny_tokenizer(290)
    tokenizer.chat_template = "{% for turn in messages %}[{{ turn.role }}] {{ turn.content }}\n{% endfor %}"
    tokenizer.save_pretrained(other)
    with process(directory, other, names=("length",)) as rewards:
        scored = rewards.score(PROMPTS, COMPLETIONS, [[1, 2]] * 5, {}, 1)
    assert scored.failures == []
    assert scored.rewards[0] == [0.0] * 5
    for model, scores in zip((directory, other), scored.rewards[1:], strict=True):
        # Rows are padded to those of their batch.
        assert scores == pytest.approx(hf_scores(model, conversations()).tolist(), abs=1e-5)
    assert len(AutoTokenizer.from_pretrained(other)) != len(AutoTokenizer.from_pretrained(directory))


def test_another_model_has_another_identity(directory, tmp_path):
    copy = shutil.copytree(directory, tmp_path / "judge")
    before = process(copy).identity
    assert process(copy).identity == before
    make_reward_model(copy, seed=3)
    assert process(copy).identity != before
    assert "models" not in process(names=("length",)).identity


def test_directories_that_are_no_reward_models(directory, tmp_path):
    with pytest.raises(UserError, match=naming("--reward_model config.json")), process(tmp_path):
        pass
    language = make_tiny_hf(tmp_path / "language", with_tokenizer=True)
    with pytest.raises(UserError, match=naming("--reward_model Qwen3ForCausalLM")), process(language):
        pass
    mistaken = shutil.copytree(language, tmp_path / "mistaken")  # its score would be random
    config = json.loads((mistaken / "config.json").read_text())
    (mistaken / "config.json").write_text(json.dumps({**config, "architectures": ["Qwen3ForSequenceClassification"]}))
    with pytest.raises(UserError, match=naming("--reward_model 2")), process(mistaken):
        pass
    config = {**config, "architectures": ["Qwen3ForSequenceClassification"], "num_labels": 1}
    (mistaken / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=naming("--reward_model score.weight")), process(mistaken):
        pass
