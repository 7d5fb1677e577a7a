"""Test rows with images: their format, tokens, labels, positions and pixels, compared with transformers."""

import base64
import json
import pickle
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from PIL import Image
from transformers import AutoConfig, ProcessorMixin
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5Model
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

from swiftlite.base.errors import UserError
from swiftlite.data.batch import AXES, ITEM, collate, collate_packed
from swiftlite.data.dataset import load_train_val
from swiftlite.data.encoder import ConversationEncoder
from swiftlite.data.image_inputs import GRID, PATCHES, ImageProcessing, axes_of, image_extras
from swiftlite.data.row_cache import RowCache
from swiftlite.data.rows.conversation import RowError, parse_row
from swiftlite.data.rows.pair import parse_pair
from swiftlite.data.rows.rated import mismatch, parse_rated
from swiftlite.data.sample import Sample, digest
from swiftlite.data.template import ChatTemplate
from tests.data.images import (
    THINKING,
    TOKENS,
    VISION,
    make_image_encoder,
    make_processor,
    make_sizes,
    noise,
    with_vision,
    writer,
)
from tests.data.templates import CHATML
from tests.messages import has_line, mentions, naming

PARSE = partial(parse_row, no_images=None)
IMAGE = {"type": "image"}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def turns(*contents: Any) -> list[dict[str, Any]]:
    """Return turns of user and assistant in alternation."""
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


# The format of rows


@pytest.mark.parametrize(
    ("row", "contents", "sources"),
    [
        ({"messages": turns("See <image>.", "Yes."), "images": ["a"]}, [[text("See "), IMAGE, text(".")]], ["a"]),
        (
            {"messages": turns("<image> or <image>?", "Yes."), "images": ["a", "b"]},
            [[IMAGE, text(" or "), IMAGE, text("?")]],
            ["a", "b"],
        ),
        ({"messages": turns("See.", "Yes."), "images": ["a", "b"]}, [[IMAGE, IMAGE, text("See.")]], ["a", "b"]),
        (
            {"messages": turns("See.", "Yes.", "And <image>?", "No."), "images": ["a", "b"]},
            [[IMAGE, text("See.")], "Yes.", [text("And "), IMAGE, text("?")], "No."],
            ["a", "b"],
        ),
        (
            {"messages": turns("Draw.", "<image>", "Nice.", "Thanks."), "images": ["a"]},
            ["Draw.", [IMAGE], "Nice.", "Thanks."],
            ["a"],
        ),
        ({"messages": turns([{"type": "image", "image": "a"}, text("See.")], "Yes.")}, [[IMAGE, text("See.")]], ["a"]),
        (
            {"messages": turns([text("See "), {"type": "image_url", "image_url": {"url": "a"}}], [text("Yes.")])},
            [[text("See "), IMAGE], "Yes."],
            ["a"],
        ),
        ({"messages": turns([{"type": "image_url", "image_url": "a"}, text("See.")], "Yes.")}, None, ["a"]),
        ({"messages": turns([IMAGE, text("See.")], "Yes."), "images": ["a"]}, [[IMAGE, text("See.")]], ["a"]),
        (
            {"messages": turns([{"type": "image", "image": "b"}, text("See <image>.")], "Yes."), "images": ["a"]},
            [[IMAGE, text("See "), IMAGE, text(".")]],
            ["b", "a"],
        ),
        ({"query": "See <image>", "response": "Yes.", "images": ["a"]}, [[text("See "), IMAGE]], ["a"]),
        ({"query": "See", "response": "Yes.", "images": "a.png"}, None, ["a.png"]),
        ({"query": "See", "response": "Yes.", "images": '["a", "b"]'}, None, ["a", "b"]),
        ({"query": "See", "response": "Yes.", "images": [{"bytes": b"abc", "path": "a"}]}, None, [b"abc"]),
        ({"query": "See", "response": "Yes.", "images": [{"bytes": None, "path": "a"}]}, None, ["a"]),
        (
            {
                "conversations": [{"from": "human", "value": "<image>\nSee."}, {"from": "gpt", "value": "Y"}],
                "images": "a",
            },
            [[IMAGE, text("\nSee.")], "Y"],
            ["a"],
        ),
        ({"query": "See", "response": "Yes.", "images": []}, ["See", "Yes."], []),
        ({"messages": turns([text("See"), text(" it.")], "Yes.")}, ["See it.", "Yes."], []),
    ],
)
def test_places_of_images(row, contents, sources):
    found = PARSE(row)
    assert [image.source for image in found.images] == sources
    if contents is not None:
        assert [message["content"] for message in found.messages][: len(contents)] == contents


def test_an_image_knows_its_field():
    row = {
        "messages": turns([text("See "), {"type": "image", "image": "b"}], "Yes.", "<image>", "No."),
        "images": ["a"],
    }
    assert [image.field for image in PARSE(row).images] == ["messages[0].content[1]", "images[0]"]


def test_a_prompt_has_the_images_of_its_turns():
    found = PARSE({"messages": turns("<image>", "<image> No."), "images": ["a", "b"]})
    assert [image.source for image in found.prompt().images] == ["a"]
    assert found.answer() == " No."


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": turns("<image> <image>", "Yes."), "images": ["a"]}, "images: 2 1 <image>"),
        ({"messages": turns("<image>", "Yes.")}, "images: 1 0 <image>"),
        ({"messages": turns([IMAGE, text("See.")], "Yes.")}, "images: 1 0"),
        ({"query": "q", "response": "a", "images": 3}, "images: 3"),
        ({"query": "q", "response": "a", "images": [3]}, "images[0]: 3"),
        ({"query": "q", "response": "a", "images": ["a", None]}, "images[1]: None"),
        ({"query": "q", "response": "a", "images": [{"path": ""}]}, "images[0]:"),
        ({"query": "q", "response": "a", "images": "[a"}, "images: JSON"),
        ({"messages": turns([{"type": "image_url", "image_url": {"url": 3}}], "Yes.")}, "messages[0].content[0]: 3"),
        (
            {"messages": turns([IMAGE | {"image": "a"}, {"type": "video", "video": "v"}], "Y")},
            "messages[0].content: video",
        ),
        (
            {"messages": turns([IMAGE | {"image": "a"}, {"type": "text", "text": 3}], "Y")},
            "messages[0].content[1].text: 3",
        ),
        ({"query": "q", "response": "a", "videos": ["v.mp4"]}, "videos:"),
        ({"query": "q", "response": "a", "audios": ["a.wav"]}, "audios:"),
        ({"query": "q", "response": "a", "image": "a.png"}, "image: images"),
    ],
)
def test_bad_rows(row, message):
    with pytest.raises(RowError, match=naming(message)):
        PARSE(row)


SEE = [IMAGE, text("See.")]
NAMED = [{"type": "image", "image": "a"}, text("See.")]


@pytest.mark.parametrize(
    "row",
    [
        {"query": "<image>See.", "response": "Yes.", "rejected_response": "No.", "images": ["a"]},
        {"messages": turns("See.", "Yes."), "rejected_response": "No.", "images": "a"},
        {"messages": turns(NAMED, "Yes."), "rejected_response": "No."},
        {"messages": turns(SEE, "Yes."), "rejected_messages": turns(SEE, "No."), "images": ["a"]},
        {"messages": turns(NAMED, "Yes."), "rejected_messages": turns(NAMED, "No.")},
        {"prompt": "<image>See.", "chosen": "Yes.", "rejected": "No.", "images": ["a"]},
        {"chosen": turns(NAMED, "Yes."), "rejected": turns(NAMED, "No.")},
    ],
)
def test_both_answers_of_a_pair_have_the_same_images(row):
    pair = parse_pair(row, no_images=None)
    assert [message["content"] for message in pair.messages] == [SEE, "Yes."]
    assert [message["content"] for message in pair.other().messages] == [SEE, "No."]
    assert [image.source for image in pair.other().images] == ["a"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"query": "q", "response": "<image>", "rejected_response": "b", "images": ["a"]}, "response:"),
        ({"query": "q", "response": "a", "rejected_response": "<image>", "images": ["a"]}, "rejected_response:"),
        ({"query": "<image>", "response": "a", "rejected_response": "<image>", "images": ["a"]}, "rejected_response:"),
        ({"query": "<image>", "response": "a", "rejected_response": "b"}, "images: 1 0"),
        ({"chosen": turns(NAMED, "Y"), "rejected": turns([{**IMAGE, "image": "b"}, text("See.")], "N")}, "rejected:"),
        ({"chosen": turns(NAMED, "Y"), "rejected": turns("See.", "N")}, "rejected:"),
    ],
)
def test_bad_pairs(row, message):
    with pytest.raises(RowError, match=naming(message)):
        parse_pair(row, no_images=None)


def test_answers_with_a_label_are_text():
    row = {"messages": turns(NAMED, "Yes."), "label": True}
    assert parse_rated(row, no_images=None).messages[0]["content"] == SEE
    with pytest.raises(RowError, match=naming("response:")):
        parse_rated({"query": "q", "response": "<image>", "label": True, "images": ["a"]}, no_images=None)
    with pytest.raises(RowError, match=naming("completion:")):
        parse_rated({"prompt": "q", "completion": "<image>", "label": True, "images": ["a"]}, no_images=None)


def test_rows_with_images_are_refused_where_no_image_is_read():
    row = {"messages": turns("q", "a"), "images": ["a.png"]}
    with pytest.raises(RowError, match=naming("images: qwen3")):
        parse_row(row, no_images="is not supported by this model (qwen3)")
    with pytest.raises(RowError, match=naming("images:")):
        parse_row(row)
    with pytest.raises(RowError, match=naming("images:")):
        parse_pair({"prompt": "q", "chosen": "a", "rejected": "b", "images": ["a.png"]})
    with pytest.raises(RowError, match=naming("images:")):
        parse_rated({"prompt": "q", "completion": "a", "label": True, "images": ["a.png"]})
    assert parse_row({"messages": turns("<image>", "a")}).messages[0]["content"] == "<image>"


# Tokens and labels


@pytest.fixture
def tokenizer(make_tokenizer):
    return with_vision(make_tokenizer(VISION))


@pytest.fixture
def write(tmp_path):
    return writer(tmp_path)


@pytest.fixture
def make_encoder(tokenizer, tmp_path):
    def make(
        max_length: int = 2048, strategy: Any = "delete", loss_scale: Any = "default", **settings
    ) -> ConversationEncoder:
        images = make_image_encoder(tokenizer, tmp_path, **settings)
        template = ChatTemplate(tokenizer, loss_scale, len(tokenizer), images.sizes)
        return ConversationEncoder(template, max_length, strategy, PARSE, images)

    return make


@pytest.fixture
def samples_of(tmp_path):
    def encode(encoder: ConversationEncoder, *rows: dict[str, Any]) -> list[Sample]:
        samples = []
        for i, row in enumerate(rows):
            encoded = encoder(PARSE(row, source=f"{tmp_path}/rows.jsonl:{i + 1}"))
            assert encoded.bad is None, encoded.bad
            samples += encoded.samples
        return samples

    return encode


class Processor(Qwen3VLProcessor):
    """transformers' processor of Qwen3-VL and Qwen3.5 without videos, which require torchvision."""

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None):
        self.image_token = TOKENS[2]
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


SIZES = {"wide.png": (50, 18), "tall.png": (10, 41), "tiny.png": (3, 2)}
ROWS = [
    {"messages": turns("What?", "That.")},
    {"messages": turns("What is <image>?", "That."), "images": ["wide.png"]},
    {"messages": turns("<image> or <image>?", "This.", "And?", "It is."), "images": ["tall.png", "wide.png"]},
    {
        "messages": turns("Look.", "At?", "<image><image>", "I see <image>."),
        "images": ["tiny.png", "wide.png", "tiny.png"],
    },
]


@pytest.fixture
def samples(make_encoder, samples_of, write):
    """Return the samples of ROWS."""
    for i, (name, size) in enumerate(SIZES.items()):
        write(name, *size, seed=i)
    return samples_of(make_encoder(), *ROWS)


@pytest.mark.parametrize("number", range(len(ROWS)))
def test_tokens_and_pixels_are_those_of_transformers(samples, tokenizer, number):
    row, sample = ROWS[number], samples[number]
    processor: Any = Processor(make_processor(), tokenizer)
    rendered = tokenizer.apply_chat_template(PARSE(row).messages, tokenize=False)
    names = list(SIZES)
    images = [noise(*SIZES[name], seed=names.index(name)) for name in row.get("images", ())]
    theirs = processor(text=[rendered], images=images or None, return_tensors="np")
    assert sample.input_ids.tolist() == theirs["input_ids"][0].tolist()
    if not images:
        assert not sample.extras
        return
    patches = sample.extras[PATCHES]
    assert len(patches) == len(sample.extras[GRID]) == (sample.extras[ITEM] >= 0).sum()
    ours = np.stack(list(patches))
    assert ours.dtype == np.float32
    assert np.array_equal(ours, theirs["pixel_values"].reshape(ours.shape))
    grids = [place[2:].tolist() for place in sample.extras[GRID] if not place[:2].any()]
    assert grids == (theirs["image_grid_thw"][:, 1:] // 2).tolist()


def test_only_text_is_trained(samples, tokenizer, make_encoder, samples_of):
    placeholder = tokenizer.convert_tokens_to_ids(TOKENS[2])
    (sample,) = samples_of(make_encoder(loss_scale="all"), ROWS[3])
    for each in (*samples, sample):
        is_placeholder = each.input_ids == placeholder
        assert (each.labels[is_placeholder] == -100).all()
        assert (each.loss_scale[is_placeholder] == 0).all()
    assert (sample.labels[1:] != -100).sum() == (sample.input_ids[1:] != placeholder).sum()
    trained = samples[2].labels[samples[2].labels != -100]
    assert tokenizer.decode(trained) == "This.<|im_end|>It is.<|im_end|>"
    trained = samples[3].labels[samples[3].labels != -100]
    assert tokenizer.decode(trained) == "At?<|im_end|>I see <|vision_start|><|vision_end|>.<|im_end|>"


@pytest.mark.parametrize(
    ("contents", "expected"),
    [
        (["See <image>.", "Yes."], ["<think>\n\n</think>\n\nYes.<|im_end|>"]),
        (
            ["<image>\nSee.", "Yes. ", "And\n<image>", "<think>\nhm\n</think>\n\nNo."],
            ["Yes.<|im_end|>", "<think>\nhm\n</think>\n\nNo.<|im_end|>"],
        ),
        (
            ["See.", "Here: <image>. ", "And?", "<image> too, <image>"],
            [
                "Here: <|vision_start|>",
                "<|vision_end|>.<|im_end|>",
                "<think>\n\n</think>\n\n<|vision_start|>",
                "<|vision_end|> too, <|vision_start|>",
                "<|vision_end|><|im_end|>",
            ],
        ),
    ],
)
def test_turns_next_to_images_are_trained(make_encoder, samples_of, tokenizer, write, contents, expected):
    write("wide.png", 50, 18)
    encoder = make_encoder()
    tokenizer.chat_template = THINKING
    (sample,) = samples_of(
        encoder, {"messages": turns(*contents), "images": ["wide.png"] * str(contents).count("<image>")}
    )
    trained = np.flatnonzero(sample.labels != -100)
    runs = np.split(trained, np.flatnonzero(np.diff(trained) > 1) + 1)
    assert [tokenizer.decode(sample.input_ids[run]) for run in runs] == expected


def test_text_is_encoded_as_without_images(samples, tokenizer):
    template = ChatTemplate(tokenizer)
    without = template.encode(parse_row(ROWS[0]))
    assert digest([without]) == digest(samples[:1])


@pytest.mark.parametrize(
    ("messages", "chat_template", "message"),
    [
        (turns("What is <|image_pad|>?", "That."), VISION, "messages[0]: <|image_pad|>"),
        (turns("What?", "A <|image_pad|>."), VISION, "messages[1]: <|image_pad|>"),
        (turns("What is <|vision_start|> for?", "That."), VISION, "messages[0]: <|vision_start|>"),
        (turns("What?", "A <|vision_end|>."), VISION, "messages[1]: <|vision_end|>"),
        (turns([text("<|image_pad|>"), {"type": "image", "image": "wide.png"}], "Yes."), VISION, "<|image_pad|>"),
        (turns([{"type": "image", "image": "wide.png"}, text("Q")], "A"), CHATML, "messages:"),
        (
            turns([{"type": "image", "image": "wide.png"}, text("Q")], "A"),
            VISION.replace("<|image_pad|>", ""),
            "messages: 0 1",
        ),
        (turns([{"type": "image", "image": "gone.png"}, text("Q")], "A"), VISION, "messages[0].content[0] gone.png"),
    ],
)
def test_rows_that_cannot_be_encoded(make_encoder, tokenizer, write, tmp_path, messages, chat_template, message):
    write("wide.png")
    encoder = make_encoder()
    tokenizer.chat_template = chat_template
    encoded = encoder(PARSE({"messages": messages}, source=f"{tmp_path}/rows.jsonl:7"))
    assert not encoded.samples
    assert mentions(str(encoded.bad), f"{tmp_path}/rows.jsonl:7 {message}")


# Truncation


def test_truncation_never_cuts_an_image(make_encoder, samples_of, write, tokenizer):
    """A row is dropped if the cut would be inside of an image, at every length and on both sides."""
    for i, (name, size) in enumerate(SIZES.items()):
        write(name, *size, seed=i)
    row = {"messages": turns("A <image> B", "C", "D <image> E", "F"), "images": ["tiny.png", "wide.png"]}
    row = row | {"messages": row["messages"] + turns("G", "H")}
    (whole,) = samples_of(make_encoder(), row)
    start, end, placeholder = tokenizer.convert_tokens_to_ids(TOKENS)
    pixels = {0: [], 1: list(make_encoder().images.processing.items_of(noise(3, 2, seed=2)))}
    num_dropped = 0
    for strategy in ("left", "right"):
        for length in range(2, len(whole)):
            found = samples_of(make_encoder(length, strategy), row)
            ids = whole.input_ids[-length:] if strategy == "left" else whole.input_ids[:length]
            starts, ends = (ids == start).sum(), (ids == end).sum()
            is_cut = starts != ends or placeholder in (ids[0], ids[-1]) or ids[0] == end or ids[-1] == start
            if not found:
                labels = whole.labels[-length:][1:] if strategy == "left" else whole.labels[:length]
                assert is_cut or (labels == -100).all()
                num_dropped += 1
                continue
            assert not is_cut
            (sample,) = found
            assert sample.input_ids.tolist() == ids.tolist()
            assert len(sample.extras.get(PATCHES, ())) == (ids == placeholder).sum()
            if starts == 0:
                assert not sample.extras
            elif strategy == "right" and starts == 1:
                assert np.array_equal(np.stack(list(sample.extras[PATCHES])), pixels[1])
            if starts:
                assert sample.extras[ITEM][ids == placeholder].tolist() == list(range((ids == placeholder).sum()))
                assert sample.extras[AXES][0].tolist() == [0, 0, 0]
    assert num_dropped > 0


# Positions

TEXT = {"num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1}
TEXT |= {"num_key_value_heads": 1, "vocab_size": 16}
MODELS = {"qwen3_5": Qwen3_5Model, "qwen3_vl": Qwen3VLModel, "qwen2_5_vl": Qwen2_5_VLModel}


@pytest.mark.parametrize("model_type", MODELS)
@pytest.mark.parametrize("number", range(len(ROWS)))
def test_positions_are_those_of_transformers(samples, tokenizer, model_type, number):
    config = AutoConfig.for_model(model_type, text_config=TEXT, vision_config={"depth": 1})
    with torch.device("meta"):
        model = MODELS[model_type](config)
    sample = samples[number]
    ids = torch.from_numpy(sample.input_ids).long()[None]
    is_image = (ids == tokenizer.convert_tokens_to_ids(TOKENS[2])).int()
    grids = [
        [1, 2 * rows, 2 * columns] for row, column, rows, columns in sample.extras.get(GRID, ()) if row == column == 0
    ]
    theirs, _ = model.get_rope_index(ids, mm_token_type_ids=is_image, image_grid_thw=torch.tensor(grids).long())
    batch = collate([sample], 0, extras=image_extras(make_sizes(tokenizer)))
    assert torch.equal(batch.extras[AXES][0], theirs)


def test_positions_by_hand():
    assert axes_of(np.array([0, 1, 1, 0]) == 1, [(2, 1)]).tolist() == [[0, 0, 0], [1, 1, 1], [1, 2, 1], [3, 3, 3]]
    assert axes_of(np.array([1, 1, 1, 1]) == 1, [(1, 3), (1, 1)]).tolist() == [
        [0, 0, 0],
        [0, 0, 1],
        [0, 0, 2],
        [3, 3, 3],
    ]


# Batches


def test_batches_of_samples_with_and_without_images(samples, tokenizer):
    extras = image_extras(make_sizes(tokenizer))
    for make in (collate, partial(collate_packed, pad_each_to_multiple_of=2, pad_to_multiple_of=8)):
        batch = make(samples, 0, num_drafts=1, extras=extras)
        expected = [item for sample in samples for item in sample.extras.get(PATCHES, ())]
        assert np.array_equal(batch.items[PATCHES].numpy(), np.stack(expected))
        assert batch.items[GRID].shape == (len(expected), 4)
        assert batch.items[GRID].dtype == torch.int64
        item_KBS = batch.extras[ITEM]
        assert torch.equal(item_KBS >= 0, batch.tokens_KBS == tokenizer.convert_tokens_to_ids(TOKENS[2]))
        assert item_KBS[0][item_KBS[0] >= 0].tolist() == list(range(len(expected)))
        of_text = (batch.sequence_KBS[0] == 0).expand(3, -1, -1)
        axes_3BS = batch.extras[AXES][0]
        assert torch.equal(axes_3BS[of_text], batch.position_ids_BS.expand(3, -1, -1)[of_text])
        padding = (batch.sequence_KBS[0] == -1).expand(3, -1, -1)
        assert not axes_3BS[padding].any()


def test_a_batch_knows_its_items_without_decoding_images(samples, tokenizer):
    extras = image_extras(make_sizes(tokenizer))
    patches = [sample.extras[PATCHES] for sample in samples if PATCHES in sample.extras]
    for each in patches:
        for image in each.images:
            Path(image.source).unlink(missing_ok=True)  # rows share images
    batch = collate(samples, 0, extras=extras)
    sizes = [size for each in patches for size in each.group_sizes]
    assert (batch.num_items, batch.item_squares) == (sum(sizes), sum(size**2 for size in sizes))
    assert batch.items.identity == collate(samples, 0, extras=extras).items.identity
    assert batch.items.identity != collate(samples[::-1], 0, extras=extras).items.identity
    with pytest.raises(UserError, match=naming(str(patches[0].images[0].source))):
        batch.items[PATCHES]


# Samples


def test_samples_are_pickled_without_pixels(make_encoder, samples_of, tmp_path, write):
    """Fifty images of a row take a few kilobytes. Unpickled samples share the settings."""
    for i in range(50):
        write(f"{i}.png", 300, 200, seed=i)
    row = {"messages": turns("Compare.", "No."), "images": [f"{i}.png" for i in range(50)]}
    (sample,) = samples_of(make_encoder(max_length=10_000), row)
    arrays = sum(array.nbytes for array in (sample.input_ids, sample.labels, sample.loss_scale))
    arrays += sample.extras[ITEM].nbytes + sample.extras[AXES].nbytes
    content = pickle.dumps(sample)
    assert len(content) - arrays < 50 * 400
    again = pickle.loads(content)
    assert digest([again]) == digest([sample])
    assert again.extras[PATCHES].processing is sample.extras[PATCHES].processing
    assert np.array_equal(next(iter(again.extras[PATCHES])), next(iter(sample.extras[PATCHES])))
    assert len(again.extras[PATCHES]) == 50 * make_encoder().images.num_items(sample.extras[PATCHES].images[0])


def test_the_digest_depends_on_pixels_and_settings(make_encoder, samples_of, write):
    write("wide.png", 50, 18)
    first = samples_of(make_encoder(), ROWS[1])
    assert digest(samples_of(make_encoder(), ROWS[1])) == digest(first)
    brighter = samples_of(make_encoder(image_mean=[0.1, 0.2, 0.3]), ROWS[1])
    write("wide.png", 50, 18, seed=1)
    other = samples_of(make_encoder(), ROWS[1])
    assert [sample.input_ids.tolist() for sample in (*first, *brighter)] == [other[0].input_ids.tolist()] * 2
    assert len({digest(samples) for samples in (first, brighter, other)}) == 3


@pytest.mark.usefixtures("fork_server")
@pytest.mark.parametrize("num_proc", [1, 2])
def test_files_with_images(make_encoder, write, write_jsonl, tmp_path, num_proc):
    """Bad images are bad rows with file and line, also in other processes."""
    for i, (name, size) in enumerate(SIZES.items()):
        write(name, *size, seed=i)
    (tmp_path / "cut.png").write_bytes((tmp_path / "wide.png").read_bytes()[:300])
    bad = [{"query": "q", "response": "a", "images": [name]} for name in ("cut.png", "../a.png", "gone.png")]
    path = write_jsonl([*ROWS, *bad])
    if num_proc == 1:  # starting processes takes a while
        data = load_train_val(make_encoder(), [path], max_bad_rows=3)
        assert data.has_images
        assert data.report.total.dropped_bad == 3
        assert len(data.train) == len(ROWS)
    with pytest.raises(UserError) as raised:
        load_train_val(make_encoder(), [path], num_proc=num_proc)
    for line, name in ((5, "cut.png"), (6, "../a.png"), (7, "gone.png")):
        assert has_line(raised.value.problem, f"{path}:{line} images[0] {name}")
    assert not load_train_val(make_encoder(), [write_jsonl(ROWS[:1], "text.jsonl")]).has_images


def test_rows_with_images_are_not_stored(make_encoder, write, write_jsonl, tmp_path):
    """Otherwise a run would not notice that an image has changed, or that a bad image was replaced."""
    for i, (name, size) in enumerate(SIZES.items()):
        write(name, *size, seed=i)
    path, gone = write_jsonl(ROWS), write_jsonl([*ROWS[:1], ROWS[1] | {"images": ["new.png"]}], "gone.jsonl")
    for _ in range(2):
        data = load_train_val(make_encoder(), [path], cache=RowCache(tmp_path / "cache"))
        assert data.digest == load_train_val(make_encoder(), [path]).digest
        with pytest.raises(UserError):
            load_train_val(make_encoder(), [gone], cache=RowCache(tmp_path / "cache"))
    write("new.png", 50, 50, seed=1)
    assert len(load_train_val(make_encoder(), [gone], cache=RowCache(tmp_path / "cache")).train) == 2
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


def test_tables_hold_images(make_encoder, write, tmp_path):
    content = write("wide.png", 50, 18).read_bytes()
    cell = {"bytes": content, "path": None}
    rows = [{"query": "q", "response": "a", "images": [cell]}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    (sample,) = load_train_val(make_encoder(), [str(tmp_path / "rows.parquet")]).train
    uri = "data:image/png;base64," + base64.b64encode(content).decode()
    (tmp_path / "rows.jsonl").write_text(json.dumps({"query": "q", "response": "a", "images": [uri]}))
    (other,) = load_train_val(make_encoder(), [str(tmp_path / "rows.jsonl")]).train
    assert digest([sample]) == digest([other])
    assert len(sample.extras[PATCHES]) > 1


def test_relative_paths_start_at_media_root(make_encoder, tokenizer, tmp_path, write_jsonl):
    (tmp_path / "pictures").mkdir()
    writer(tmp_path / "pictures")("a.png")
    path = write_jsonl([{"query": "q", "response": "a", "images": ["a.png"]}])
    with pytest.raises(UserError, match=naming(f"{path}:1 images[0] a.png --media_root")):
        load_train_val(make_encoder(), [path])
    assert load_train_val(make_encoder(media_root=tmp_path / "pictures"), [path]).has_images


# Pairs and labeled answers


def encode_as(parse: Any, encoder: ConversationEncoder, directory: Path, row: dict[str, Any]) -> Sample:
    (sample,) = encoder(parse(row, no_images=None, source=f"{directory}/rows.jsonl:1")).samples
    return sample


def test_both_answers_share_pixels(make_encoder, write, tmp_path):
    """Each answer has tokens and positions as in a row with this answer alone."""
    write("wide.png", 50, 18)
    row = {"query": "What is <image>?", "response": "That.", "images": ["wide.png"]}
    pair = encode_as(parse_pair, make_encoder(), tmp_path, row | {"rejected_response": "That is unknown."})
    (rejected,) = pair.others
    assert rejected.extras[PATCHES] is pair.extras[PATCHES]
    assert rejected.extras[GRID] is pair.extras[GRID]
    for answer, text in ((pair, "That."), (rejected, "That is unknown.")):
        alone = encode_as(parse_row, make_encoder(), tmp_path, row | {"response": text})
        assert digest([replace(answer, others=())]) == digest([alone])
    again = pickle.loads(pickle.dumps(pair))
    assert again.others[0].extras[PATCHES] is again.extras[PATCHES]


@pytest.mark.parametrize(("strategy", "max_length"), [("delete", 2048), ("right", 32), ("left", 32)])
def test_a_companion_has_the_images_of_its_question(make_encoder, write, tmp_path, strategy, max_length):
    """Rows whose questions differ only in their images have different questions."""
    for number in range(2):
        write(f"{number}.png", 50, 18, seed=number)
    encoder = make_encoder()
    samples = []
    for image, answer in (("0.png", "That."), ("1.png", "It is unknown, " * 9)):
        row = {"query": "What is <image>?", "response": answer, "images": [image], "label": True}
        samples.append(encode_as(parse_rated, encoder, tmp_path, row))
    first, second = mismatch(samples, max_length, strategy, seed=0)
    for sample, other, expected in ((first, second, "It is unknown, " * 9), (second, first, "That.")):
        companion = sample.companion
        assert companion is not None
        row = {
            "query": "What is <image>?",
            "response": expected,
            "images": [Path(sample.extras[PATCHES].images[0].source).name],
        }
        whole = encode_as(parse_row, encoder, tmp_path, row)
        length = min(max_length, len(whole))
        assert companion.input_ids.tolist() == whole.input_ids[:length].tolist()
        assert companion.extras[PATCHES].images == whole.extras[PATCHES].images
        for name in (ITEM, AXES):
            assert companion.extras[name].tolist() == whole.extras[name][:length].tolist()
        assert other.extras[PATCHES].images != companion.extras[PATCHES].images


# The settings of the processor


def test_bounds_of_pixels_replace_those_of_the_model(make_encoder):
    images = make_encoder().images
    for highest, lowest, num_items in ((None, None, 36), (640, None, 9), (9000, 8000, 121)):
        processing = images.processing.with_bounds(highest, lowest)
        bounds = {"max_pixels": highest or 40 * 8 * 8, "min_pixels": lowest or 8 * 8}
        items = processing.items_of(noise(300, 300))
        theirs = make_processor(**bounds).preprocess([noise(300, 300)], return_tensors="np")["pixel_values"]
        assert np.array_equal(items, theirs.reshape(items.shape))
        assert len(items) == num_items


@pytest.mark.parametrize(
    ("highest", "lowest", "message"),
    [(63, None, "--max_pixels 63 64"), (None, 10_000, "--min_pixels 10000 --max_pixels 2560")],
)
def test_bad_bounds(make_encoder, highest, lowest, message):
    processing = make_encoder().images.processing
    with pytest.raises(UserError) as raised:
        processing.with_bounds(highest, lowest)
    assert mentions(str(raised.value), message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image_processor_type": "CLIPImageProcessor"}, "preprocessor_config.json image_processor_type"),
        ({"patch_size": 5}, "preprocessor_config.json patch_size 5 4 config.json"),
        ({"merge_size": 1}, "preprocessor_config.json merge_size 1 2 config.json"),
        (None, "preprocessor_config.json"),
        ("{", "preprocessor_config.json"),
    ],
)
def test_bad_settings(make_encoder, tmp_path, change, message):
    sizes = make_encoder().images.sizes
    path: Path = tmp_path / "preprocessor_config.json"
    if change is None:
        path.unlink()
    elif isinstance(change, str):
        path.write_text(change)
    else:
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UserError) as raised:
        ImageProcessing.read(tmp_path, sizes)
    assert mentions(str(raised.value), message)


def test_gray_levels_that_are_clipped_are_named_once(tmp_path, tokenizer, caplog):
    """Engines clip them too, so training sees the same pixels."""
    levels = np.arange(0, 400 * 16, 16, dtype=np.uint16).reshape(20, 20)
    for number in range(2):
        Image.fromarray(levels).save(tmp_path / f"deep{number}.png")
    Image.fromarray(levels // 64).save(tmp_path / "dark.png")
    encoder = make_image_encoder(tokenizer, tmp_path, tmp_path)
    for number, name in enumerate(("dark.png", "deep0.png", "deep1.png")):
        row = {"query": "What is <image>?", "response": "A fox.", "images": [name]}
        encoder.read(PARSE(row, source=f"rows.jsonl:{number}"))
    (message,) = caplog.messages
    assert mentions(message, "rows.jsonl:1 images[0] deep0.png 255")
