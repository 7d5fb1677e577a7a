import pytest

from swiftlite.base.drafting import Drafting
from swiftlite.base.errors import UserError
from swiftlite.base.heads import REMOVE, Heads
from tests.messages import naming

FED = {"takes_before_norm": True, "recycles_before_norm": False, "zeroes_first_embedding": True}


@pytest.mark.parametrize(
    ("hf_config", "heads"),
    [
        ({}, Heads()),
        ({"num_nextn_predict_layers": None}, Heads()),
        ({"num_nextn_predict_layers": "two"}, Heads()),
        ({"num_nextn_predict_layers": 2}, Heads(2)),
        ({"num_nextn_predict_layers": 1, "mtp_unroll": 3}, Heads(1, unroll=3)),
        (
            {"num_nextn_predict_layers": 1, "mtp_draft_vocab": "0-1 4", "vocab_size": 9},
            Heads(1, draft_vocab=(0, 1, 4)),
        ),
        ({"num_nextn_predict_layers": 1, "mtp_draft_vocab": "", "vocab_size": 9}, Heads(1)),
        # As written by versions that had no heads with chains_before_norm, then as written now.
        ({"num_nextn_predict_layers": 1, "mtp_drafting": FED}, Heads(1, drafting=Drafting(True, False, True))),
        (
            {"num_nextn_predict_layers": 1, "mtp_drafting": FED | {"chains_before_norm": True}},
            Heads(1, drafting=Drafting(True, False, True, True)),
        ),
    ],
)
def test_a_config_promises_heads(hf_config, heads):
    assert Heads.from_config(hf_config) == heads


def test_a_config_is_changed_to_promise_other_heads():
    assert Heads().config_change({}) == {}
    assert Heads(1).config_change({}) == {"num_nextn_predict_layers": 1}
    assert Heads(2).config_change({"num_nextn_predict_layers": 2}) == {"num_nextn_predict_layers": 2}
    assert Heads().config_change({"num_nextn_predict_layers": 2}) == {"num_nextn_predict_layers": 0}
    one = {"num_nextn_predict_layers": 1}
    assert Heads(1, unroll=3).config_change(one) == one | {"mtp_unroll": 3}
    assert Heads(1).config_change(one | {"mtp_unroll": 3}) == one | {"mtp_unroll": 1}
    assert Heads(1, draft_vocab=(0, 1, 4)).config_change(one) == one | {"mtp_draft_vocab": "0-1 4"}
    assert Heads(1, drafting=Drafting(True, False, True)).config_change(one) == one | {
        "mtp_drafting": FED | {"chains_before_norm": False}
    }
    whole = one | {"mtp_draft_vocab": "0-1 4", "vocab_size": 9}
    assert Heads(1).config_change(whole) == one | {"mtp_draft_vocab": ""}
    assert Heads().config_change({"drafter": {"kind": "eagle3", "layers": 1}}) == {
        "num_nextn_predict_layers": 0,
        "drafter": REMOVE,
    }
    assert Heads(1).config_change(one | {"mtp_drafting": FED}) == one | {"mtp_drafting": REMOVE}
    assert Heads.from_config({"drafter": None, "mtp_drafting": None}) == Heads()  # of exports by earlier releases


@pytest.mark.parametrize(
    ("heads", "weights"),
    [
        (Heads(), ()),
        (Heads(2), (1 / 2, 1 / 2)),
        (Heads(1, unroll=3, beta=0.5), (4 / 7, 2 / 7, 1 / 7)),
    ],
)
def test_each_drafted_token_has_its_weight(heads, weights):
    assert heads.weights == pytest.approx(weights)
    assert heads.drafts == len(weights)


@pytest.mark.parametrize("content", ["sglang", {}, {**FED, "takes_before_norm": 1}, {**FED, "more": True}, [FED]])
def test_what_heads_are_fed_is_whole(content):
    with pytest.raises(UserError, match=naming("config.json: mtp_drafting true false takes_before_norm")):
        Heads.from_config({"num_nextn_predict_layers": 1, "mtp_drafting": content})
