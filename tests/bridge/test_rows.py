"""Test that the bridge rows of a layer, which are defined once, are used for every layer."""

from swiftlite.bridge.rows import Row, lift


def test_lifted_rows_have_whole_names_on_both_sides():
    row = Row("norm.weight", {"input_norm.weight": (4,)}, hf_copies=("twin",), mcore_copies=("other.weight",))
    (lifted,) = lift([row], "decoder.layers.3.", "model.layers.3.")
    assert lifted.mcore == "decoder.layers.3.norm.weight"
    assert lifted.hf == {"model.layers.3.input_norm.weight": (4,)}
    assert lifted.hf_copies == ("model.layers.3.twin",)
    assert lifted.mcore_copies == ("decoder.layers.3.other.weight",)


def test_copies_have_the_shape_of_their_original():
    row = Row("embedding.weight", {"embed_tokens.weight": (8, 4)}, hf_copies=("lm_head.weight",))
    assert row.hf_shapes() == {"embed_tokens.weight": (8, 4), "lm_head.weight": (8, 4)}
