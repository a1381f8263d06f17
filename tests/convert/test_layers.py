"""The layer grammar."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regraft.convert.layers import layer_strip, parse_layers, ruler
from regraft.errors import UserError


@pytest.mark.parametrize(
    "text,wanted",
    [
        ("0,2", [0, 2]),
        ("0-3", [0, 1, 2, 3]),
        (" 1, 4-5 ,1", [1, 4, 5]),
        ("all", list(range(8))),
        ("every:4", [3, 7]),
        ("every:1", list(range(8))),
        ("SSSL", [3, 7]),
        ("LS", [0, 2, 4, 6]),
        ("L", list(range(8))),
        ("SSSSSLLS", [5, 6]),
    ],
)
def test_what_it_says(text, wanted):
    assert parse_layers(text, 8) == wanted


@pytest.mark.parametrize(
    "text,told",
    [
        ("8", "layer 8 is out of range"),
        ("0-8", "layer 8 is out of range"),
        ("-1", "not a layer"),
        ("5-2", "runs backwards"),
        ("every:0", "every:N"),
        ("every:9", "every:N"),
        ("S", "converts no layer"),
        ("SSSSSSSSL", "wrong depth"),
        ("", "no layers"),
        ("1,,2", "not a layer"),
        ("sl", "neither layers nor a file"),
        ("1-2-3", "not a layer"),
    ],
)
def test_what_it_refuses(text, told):
    with pytest.raises(UserError, match=told) as caught:
        parse_layers(text, 8)
    assert caught.value.fix


def test_files(tmp_path):
    (tmp_path / "a.txt").write_text("0-2\n")
    assert parse_layers(str(tmp_path / "a.txt"), 8) == [0, 1, 2]
    path = tmp_path / "layers.json"
    path.write_text(json.dumps({"num_layers": 8, "converted": [1, 5]}))
    assert parse_layers(str(path), 8) == [1, 5]
    with pytest.raises(UserError, match="wrong depth"):
        parse_layers(str(path), 9)
    path.write_text("{}")
    with pytest.raises(UserError, match=r"not a layers\.json"):
        parse_layers(str(path), 8)
    path.write_text(json.dumps({"num_layers": 8, "converted": [8]}))
    with pytest.raises(UserError, match="out of range"):
        parse_layers(str(path), 8)


@given(st.sets(st.integers(0, 40), min_size=1), st.integers(41, 60))
def test_lists_and_strips_round_trip(layers, depth):
    text = ",".join(map(str, layers))
    assert parse_layers(text, depth) == sorted(layers)
    strip = layer_strip(layers, depth)
    assert len(strip) == depth and parse_layers(strip, depth) == sorted(layers)


def test_ruler():
    assert ruler(30) == "0         10        20"
